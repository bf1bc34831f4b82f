"""The objectives of training: read `divergences`, then `fused`, which `draft_objective` and `head_objective` call."""

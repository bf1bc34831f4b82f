"""The objectives of training: read `divergences`, then `fused`, which `objectives` calls."""

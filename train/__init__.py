"""Training: the entries for `accelerate launch`, the one training loop, checkpointing."""

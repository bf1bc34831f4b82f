"""Training: the entries for `accelerate launch`, the training loop, its tasks and measurements, and the planner."""

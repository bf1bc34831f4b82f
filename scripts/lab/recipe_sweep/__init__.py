"""Small distillation runs over divergences and data policies, and the choice among them. Start with `run.run_sweep`."""

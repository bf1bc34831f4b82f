"""What a round costs, and what speed follows: `timing_sweep` measures, `prediction` interpolates."""

"""The distillation benchmark: loss and training beside plain ways and TRL's. Start with `benchmark.compare_distillation`."""

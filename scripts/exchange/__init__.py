"""The trial of an imported draft before its artifact is written. Start with `trial.try_out`."""

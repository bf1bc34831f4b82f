"""Other programs' checkpoints: `importing` makes artifacts of them, `exporting` makes them of artifacts."""

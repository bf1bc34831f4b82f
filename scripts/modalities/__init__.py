"""A target whose tokens are no text, of real data, trained in minutes: `make demo-images`."""

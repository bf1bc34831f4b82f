"""Targets whose tokens are no text, of real data, trained in minutes: `make demo-images`, `make demo-speech`."""

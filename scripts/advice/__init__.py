"""Advice by measurement: small trials, successive halving, and what they say. Start with `run.advise`."""

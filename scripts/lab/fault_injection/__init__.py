"""Runs that are killed, stopped and damaged at random. Start with `rounds.soak`."""

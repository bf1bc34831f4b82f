"""Measurements of a training run: metrics of steps and evaluations, time by part, profiles, trackers."""

"""Predicted speed beside measured speed, and what evaluating costs.

Start with `benchmark`.
"""

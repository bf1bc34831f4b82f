"""Benchmarks, and what compares two commits. No part of the wheel."""

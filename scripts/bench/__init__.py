"""Benchmarks: ours beside another way of doing the same, in turns. `scripts/benchmark.py` starts them; they share `harness`."""

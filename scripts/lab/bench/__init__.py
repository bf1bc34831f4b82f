"""Benchmarks: ours beside another way of doing the same, in turns. `lab/benchmark.py` starts them."""

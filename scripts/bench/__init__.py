"""Benchmarks: ours beside another way of doing the same, in turns.

Each folder holds one benchmark; `harness` is what they share.
"""

"""Several processes beside one.

Start with `benchmark`.
"""

"""The decoder beside transformers' generation.

Start with `benchmark`.
"""

"""Checks before a long run.

Start with `sanity`.
"""

"""Trials of imported drafts, and the memory that exports and imports take.

Start with `trial`.
"""

"""Divergences between target and draft, and the objectives of training.

Read `pairs`, `divergences`, `chunked` in this order; `draft_objective` and `head_objective` call them.
"""

"""Prompts in, conversations written by the target out.

Start with `make_dataset.make_data`.
"""

"""Prompts in, conversations out: written by the target here, by a server, or brought by the data set.

Start with `make_dataset`; everything that is written locally comes from `continuation.continue_rows`.
"""

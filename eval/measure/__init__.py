"""Runs in turns on a suite of prompts.

Start with `interleaved`.
"""

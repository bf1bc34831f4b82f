"""Measuring proposers on a suite of prompts, interleaved with plain decoding.

Enter with `measure_share`, for the processes of an evaluation, or `measure`, for one process.
"""

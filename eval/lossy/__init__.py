"""Decoding that gives the target's distribution up for speed.

Enter with `generate` or `decode`, which follow `decode.lossy`; a report on it says so.
"""

from eval.lossy.decode import decode, generate

__all__ = ["decode", "generate"]

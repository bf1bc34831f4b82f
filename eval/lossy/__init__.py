"""Decoding that gives the target's distribution up for speed.

Off unless `decode.lossy` is set; a report says so.
"""

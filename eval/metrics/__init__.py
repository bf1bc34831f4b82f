"""From the records of decoding to numbers.

Start with `acceptance` and `speed`.
"""

"""What a round costs on a machine, and predictions of speed from it.

Start with `predict`.
"""

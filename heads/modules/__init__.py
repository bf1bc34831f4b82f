"""The parts that heads are built from, and the interface between a head and its training.

Start with `interface.HeadModule`, then `layers.DraftHead`.
"""

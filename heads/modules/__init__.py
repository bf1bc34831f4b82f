"""The parts that heads are built from, and the interface between a head and its training.

Start with `output_head.HeadModule`, then `interface.Depth`.
"""

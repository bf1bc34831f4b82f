"""The parts that heads are built from, and the interface between a head and its training.

Start with `interface.HeadModule`, then `layers.DraftHead`.
"""

from heads.modules.interface import Batch, Depth, Family, HeadModule

__all__ = ["Batch", "Depth", "Family", "HeadModule"]

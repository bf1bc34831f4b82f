"""Divergences between target and draft, and the objectives of training.

Read `pairs`, `divergences`, `chunked` in this order; `draft_objective` and `head_objective` call them.
"""

from distill.loss.chunked import chunked_losses
from distill.loss.divergences import DIVERGENCES, acceptance, configured_divergence
from distill.loss.draft_objective import DraftObjective
from distill.loss.head_objective import HeadObjective

__all__ = ["DIVERGENCES", "DraftObjective", "HeadObjective", "acceptance", "chunked_losses", "configured_divergence"]

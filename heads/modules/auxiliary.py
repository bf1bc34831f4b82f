"""Predictions beside a depth's own, which only the loss sees: logits of an earlier stage than those that are drafted from.

N rows of the depth, D width of what the logits are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from heads.modules.interface import Depth


@dataclass(frozen=True, kw_only=True)
class Auxiliary:
    """A prediction of a depth's tokens at the depth's rows, of which no statistics are kept.

    Args:
        hidden_ND, logits_of, parameters: as those of a `Depth`.
        weight: of its divergence, relative to that of the depth's own prediction.
    """

    hidden_ND: Tensor
    logits_of: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    weight: float


@dataclass(frozen=True, kw_only=True)
class AssistedDepth(Depth):
    """A depth whose loss has further predictions in it."""

    auxiliaries: tuple[Auxiliary, ...] = ()


def assisted(
    depth: Depth,
    *,
    hidden_ND: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    parameters: tuple[Tensor, ...],
    auxiliaries: tuple[Auxiliary, ...] = (),
) -> AssistedDepth:
    """Return a depth with other logits, which are no longer the output head's alone: some columns of them cannot be had."""
    changed = {"hidden_ND": hidden_ND, "logits_of": logits_of, "parameters": parameters, "columns_of": None}
    return AssistedDepth(**vars(depth) | changed, auxiliaries=auxiliaries)

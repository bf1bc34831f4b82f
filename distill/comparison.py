"""Draft and target compared at the rows of one chunk: divergence, its gradient with respect to the draft's logits, acceptance.

Between the heads and the divergences: `distill.chunked` brings both sides' logits, a few rows of them are made a `Pair` and
handed to a closed form (`distill.closed_forms`), or to autograd where there is none. Few rows, because on a CPU a pass over
the vocabulary costs ten times as much once its tensors fall out of the cache and the system takes the memory back.

C rows of one chunk, R of them at a time, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.closed_forms import closed_form
from distill.losses import Divergence, acceptance, at_least_float32
from distill.target_rows import TargetChunk

# Bytes of a float32 tensor over the vocabulary, about ten of which are in use at a time: they should stay in the cache.
# Of 0.6 to 80 MB, 1 to 2 were fastest on one core with 1 MiB of L2 and 32 MiB of shared L3 cache.
TILE_BYTES = 2**21


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How two sides are compared, the same for all chunks; see `distill.chunked.chunked_loss_against`."""

    divergence: Divergence
    temperature: float
    draft_token_ids_W: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was seen at the rows of a chunk, without a graph.

    values_C: the divergence.
    acceptance_C: at temperature 1.
    top1_agrees_C: bool, whether the likeliest tokens agree.
    """

    values_C: Tensor
    acceptance_C: Tensor
    top1_agrees_C: Tensor


def compare(
    rule: Rule, target: TargetChunk, draft_logits_CW: Tensor, labels_C: Tensor | None, weights_C: Tensor | None
) -> tuple[Comparison, Tensor | None]:
    """Compare both sides at the rows of a chunk.

    Args:
        rule: how.
        target: what the target says at these rows.
        draft_logits_CW: any float type, without a graph.
        labels_C: **draft** ids, negative for none; for `cross_entropy`.
        weights_C: what each row's value is multiplied with in the sum that the gradient is of; None: no gradient.

    Returns:
        What was seen, and the gradient `[C, W]` of the weighted sum of values with respect to the draft's logits, in their
        dtype, or None.
    """
    gradient_CW = None if weights_C is None else torch.empty_like(draft_logits_CW)
    figures = []
    for rows in _tiles(draft_logits_CW, target):
        labels_R = None if labels_C is None else labels_C[rows]
        draft_RW = at_least_float32(draft_logits_CW[rows])
        *figures_R, gradient_RW = _compare_rows(rule, target.part(rows), draft_RW, labels_R, weights_C is not None)
        figures.append(figures_R)
        if weights_C is not None and gradient_CW is not None:
            torch.mul(gradient_RW, weights_C[rows].unsqueeze(-1), out=gradient_CW[rows])
    values_C, acceptance_C, top1_agrees_C = (torch.cat(column) for column in zip(*figures, strict=True))
    return Comparison(values_C=values_C, acceptance_C=acceptance_C, top1_agrees_C=top1_agrees_C), gradient_CW


def _compare_rows(
    rule: Rule, target: TargetChunk, draft_RW: Tensor, labels_R: Tensor | None, wants_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return values, acceptance, top-1 agreement, and the values' gradient `[R, W]`; that is empty where not wanted."""
    ids_W = rule.draft_token_ids_W
    form = closed_form(rule.divergence) if target.is_dense else None
    graph = wants_gradient and form is None
    leaf_RW = draft_RW.detach().requires_grad_(graph)
    with torch.set_grad_enabled(graph):
        pair = target.pair(leaf_RW, temperature=rule.temperature, draft_token_ids_W=ids_W, labels=labels_R)
        values_R, gradient_RW = (rule.divergence(pair), leaf_RW.new_empty(0)) if form is None else form(pair)
        if graph:
            (gradient_RW,) = torch.autograd.grad(values_R.sum(), leaf_RW)
    with torch.no_grad():
        at_one = pair if rule.temperature == 1 else target.pair(draft_RW, temperature=1.0, draft_token_ids_W=ids_W)
        acceptance_R = acceptance(at_one)
    draft_top_R = draft_RW.argmax(-1)
    top1_agrees_R = target.top1_C == (draft_top_R if ids_W is None else ids_W[draft_top_R])
    return values_R.detach(), acceptance_R, top1_agrees_R, gradient_RW


def _tiles(draft_logits_CW: Tensor, target: TargetChunk) -> Iterator[slice]:
    """Yield rows to work on at a time: all of them on a GPU, where small tensors only wait for their launch."""
    num_rows, num_columns = draft_logits_CW.shape
    bytes_a_row = 4 * max(num_columns, target.num_columns)
    size = max(1, TILE_BYTES // bytes_a_row if draft_logits_CW.device.type == "cpu" else num_rows)
    for start in range(0, max(1, num_rows), size):  # a chunk of no rows is a tile, too
        yield slice(start, start + size)

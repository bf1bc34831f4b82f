"""The distillation loss from hidden states, a few positions at a time, so that no `[positions, vocabulary]` tensor ever lives.

For `chunk_size` rows at a time: draft hidden states -> draft head -> logits, the target's rows (`distill.loss.pairs`),
divergence and gradient (`distill.loss.divergences`), back through the draft's head. One autograd function does this in its
forward, where the logits exist anyway, and keeps only the gradients with respect to the draft's hidden states and head, which
its backward multiplies with the incoming gradient. Value and gradients are those of the unchunked loss.

Row n stands at some position t and predicts token t+1. N rows, C rows of one chunk, R rows of a tile, D width of the draft, V
target vocabulary, W draft vocabulary.

Where processes hold weights in parts (FSDP, ZeRO-3), the head's must be whole during the call and, where trained, when its
gradient arrives. A linear head is applied without running its module: these engines gather weights whenever a module runs, in
all processes together, and processes may have different numbers of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distill.loss.divergences import ClosedForm, Divergence, acceptance, closed_form
from distill.loss.logit_head import LogitHead
from distill.loss.pairs import DenseChunk, Pair, PlacedRows, TargetChunk, TargetRows, at_least_float32
from heads.device import has_compiler, keeps_small_tensors_near
from heads.sampling.probabilities import greedy_token

# Bytes of a float32 tensor over the vocabulary, about ten of which are in use at a time: they should stay in the cache.
# Of 0.6 to 80 MB, 1 to 2 were fastest on one core with 1 MiB of L2 and 32 MiB of shared L3 cache.
TILE_BYTES = 2**21
# Columns from which on a CPU's loss is compiled, if it is not said: with fewer, compiling takes longer than it saves.
COMPILED_COLUMNS = 1024
# Rows of a chunk where none are given. On a GPU a product of few rows waits for the head's weights.
CHUNK_ON_CPU, CHUNK = 128, 2048


class ChunkedLoss(NamedTuple):
    """A loss and its per-row statistics; rows of weight 0 hold 0 and False.

    A tuple, because ZeRO-3 finds the tensors that a module returns, and so the start of its backward, in tuples only.

    loss: scalar, sum of weights times values; backward goes from here.
    values_N: the divergence at each row, detached.
    acceptance_N: sum_v min(p, q) at temperature 1, exact, detached; mass outside the draft vocabulary counts as rejected.
    top1_agrees_N: bool, whether draft and target have the same most likely token: acceptance under greedy decoding.
    """

    loss: Tensor
    values_N: Tensor
    acceptance_N: Tensor
    top1_agrees_N: Tensor


class RowStatistics(NamedTuple):
    """Of C rows: the divergence, sum_v min(p, q) at temperature 1, and whether the most likely tokens agree."""

    values_C: Tensor
    acceptance_C: Tensor
    top1_agrees_C: Tensor


@dataclass(frozen=True, kw_only=True)
class LossPart:
    """Rows of a loss that are predicted by one head, as one depth of a draft is.

    Args:
        target: the target's distributions at these rows, without gradient.
        draft_hidden_ND: final, normed hidden states of the draft.
        draft_head: its output may have W columns, see `draft_token_ids_W`.
        weights_N: what each row's value is multiplied with. Where a step has L labels in all micro-batches and processes, and
            gradients are averaged over R processes, R / L, so that every label weighs the same.
        draft_token_ids_W: int64, the target's id of each draft token (d2t); None where the vocabularies are one.
        labels_N: int64, **target** ids of token t+1, negative for none; for `cross_entropy`. A label that the draft
            vocabulary leaves out counts as none.
    """

    target: TargetRows
    draft_hidden_ND: Tensor
    draft_head: LogitHead
    weights_N: Tensor
    draft_token_ids_W: Tensor | None = None
    labels_N: Tensor | None = None


def rows_of_chunk(given: int | None, *, on_cpu: bool) -> int:
    """Return how many rows' logits live at one time, by `LossConfig.chunk_size`."""
    return (CHUNK_ON_CPU if on_cpu else CHUNK) if given is None else given


def chunked_losses(
    parts: Sequence[LossPart],
    divergence: Divergence,
    *,
    chunk_size: int,
    temperature: float = 1.0,
    compiled: bool | None = None,
) -> list[ChunkedLoss]:
    """Return the weighted sum of a divergence over the rows of all parts, at least one, and each part's statistics.

    The first result's `loss` is that of all parts, the others' are 0: a head that several parts share gets one gradient, not
    one for each of them. Rows of weight 0 count for nothing, but are computed, since the host does not know which they are:
    they must be finite. Weights of 0, or no rows, yield a loss of 0 that still has a (zero) gradient, so that under DDP a rank
    without labels takes part in the reduction. Logits of `chunk_size` rows live at one time, which changes memory and speed,
    never the result. `temperature` divides both sides' logits in the divergence. `ValueError` where these cannot be paired.
    `compiled` as in `LossConfig`.
    """
    parameters = list({id(each): each for part in parts for each in part.draft_head.parameters}.values())
    inputs = [*(part.draft_hidden_ND for part in parts), *parameters]
    if not torch.is_grad_enabled():  # checked here: inside the function's forward gradients are always off
        inputs = [tensor.detach() for tensor in inputs]
    compare_rows = partial(compare, divergence, temperature=temperature, compiled=compiled)
    loss, *statistics = _ChunkedLoss.apply(parts, compare_rows, chunk_size, parameters, *inputs)
    losses = [loss, *(loss.new_zeros(()) for _ in parts[1:])]
    return [ChunkedLoss(each, *statistics[3 * number : 3 * number + 3]) for number, each in enumerate(losses)]


class _ChunkedLoss(torch.autograd.Function):
    """Computes the loss and, while the logits of a chunk are there, its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        parts: Sequence[LossPart],
        compare_rows: Callable[..., tuple[RowStatistics, Tensor | None]],
        chunk_size: int,
        parameters: list[Tensor],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        wanted = ctx.needs_input_grad[4:]
        hidden = inputs[: len(parts)]
        wide = torch.promote_types(hidden[0].dtype, torch.float32)
        weights = [part.weights_N.detach().to(wide) for part in parts]
        # Gradients are kept in units of the largest weight. A weight is one over the count of labels, and under float16 the
        # gradient of a logit times that would underflow before the loss scale, which only arrives in the backward.
        largest = torch.cat([*weights, weights[0].new_zeros(1)]).abs().max()
        unit = torch.where(largest > 0, largest, 1)
        grad_hidden = [torch.zeros_like(each) if wants else None for each, wants in zip(hidden, wanted, strict=False)]
        grad_of = {  # of each trained parameter, by its id
            id(each): torch.zeros_like(each, dtype=wide)
            for each, wants in zip(parameters, wanted[len(parts) :], strict=True)
            if wants
        }
        comparisons = [
            _Comparison(part, hidden_ND, weights_N / unit, grad_hidden_ND, grad_of)
            for part, hidden_ND, weights_N, grad_hidden_ND in zip(parts, hidden, weights, grad_hidden, strict=True)
        ]
        for number, rows in _chunks(parts, chunk_size):
            comparisons[number].add(rows, compare_rows)
        losses = [(weights_N * each.statistics.values_C).sum() for weights_N, each in zip(weights, comparisons, strict=True)]
        statistics = [values for each in comparisons for values in each.statistics]
        made = [*grad_hidden, *(grad_of.get(id(each)) for each in parameters)]
        ctx.wanted_dtypes = [None if each is None else own.dtype for own, each in zip(inputs, made, strict=True)]
        ctx.save_for_backward(unit, *(each for each in made if each is not None))
        ctx.mark_non_differentiable(*statistics)
        return torch.stack(losses).sum(), *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        unit, *saved = ctx.saved_tensors
        scale = grad_loss * unit
        gradients = iter(saved)
        wanted = ((next(gradients) * scale).to(dtype) if dtype is not None else None for dtype in ctx.wanted_dtypes)
        return None, None, None, None, *wanted


class _Comparison:
    """The comparison of one part: statistics of its rows, and gradients of their weighted sum, where these are wanted."""

    def __init__(
        self,
        part: LossPart,
        hidden_ND: Tensor,
        weights_N: Tensor,
        grad_hidden_ND: Tensor | None,
        grad_of: Mapping[int, Tensor],
    ) -> None:
        self.part, self.hidden_ND, self.weights_N = part, hidden_ND, weights_N
        self.grad_hidden_ND, self.grad_of = grad_hidden_ND, grad_of
        self._trained = [each for each in part.draft_head.parameters if id(each) in grad_of]
        self._labels_N = _draft_ids(part.labels_N, part.draft_token_ids_W)
        self.statistics = RowStatistics(
            torch.zeros_like(weights_N), torch.zeros_like(weights_N), torch.zeros_like(weights_N, dtype=torch.bool)
        )

    def add(self, rows: slice, compare_rows: Callable[..., tuple[RowStatistics, Tensor | None]]) -> None:
        """Compare some rows."""
        part, weights_C = self.part, self.weights_N[rows]
        hidden_CD = self.hidden_ND[rows].detach().requires_grad_(self.grad_hidden_ND is not None)
        leaves = self._trained if self.grad_hidden_ND is None else [hidden_CD, *self._trained]
        with torch.set_grad_enabled(bool(leaves)):
            logits_CW = part.draft_head.logits_of(hidden_CD)
        found, gradient_CW = compare_rows(
            part.target.at(rows),
            logits_CW.detach(),
            weights_C if leaves else None,
            draft_token_ids_W=part.draft_token_ids_W,
            labels_C=None if self._labels_N is None else self._labels_N[rows],
        )
        for kept_N, found_C in zip(self.statistics, found, strict=True):
            kept_N[rows] = torch.where(weights_C != 0, found_C.to(kept_N.dtype), 0)
        if not leaves:
            return
        with torch.autocast(hidden_CD.device.type, enabled=False):  # as everywhere, autocast belongs to the forward alone
            gradients = list(torch.autograd.grad(logits_CW, leaves, gradient_CW))
        if self.grad_hidden_ND is not None:
            self.grad_hidden_ND[rows] = gradients.pop(0)
        for each, gradient in zip(self._trained, gradients, strict=True):
            self.grad_of[id(each)].add_(gradient)


def _chunks(parts: Sequence[LossPart], chunk_size: int) -> Iterator[tuple[int, slice]]:
    """Yield the number of a part and some of its rows, until all were; parts that share the target's logits take turns."""
    targets = [part.target for part in parts]
    if all(isinstance(target, PlacedRows) for target in targets):
        placed = cast(list[PlacedRows], targets)
        for start in placed[0].shared.chunks:
            for number, target in enumerate(placed):
                if (rows := target.within(start)).start < rows.stop:
                    yield number, rows
        return
    for number, part in enumerate(parts):
        for start in range(0, max(1, len(part.draft_hidden_ND)), chunk_size):  # a chunk of no rows, too, has gradients of 0
            yield number, slice(start, start + chunk_size)


def compare(
    divergence: Divergence,
    target: TargetChunk,
    draft_logits_CW: Tensor,
    weights_C: Tensor | None,
    *,
    temperature: float = 1.0,
    draft_token_ids_W: Tensor | None = None,
    labels_C: Tensor | None = None,
    compiled: bool | None = None,
) -> tuple[RowStatistics, Tensor | None]:
    """Compare target and draft at the rows of a chunk, a tile of rows at a time.

    On a CPU a pass over the vocabulary costs ten times as much once its tensors no longer fit into the cache; on a GPU small
    tensors would only add launches, and all rows are one tile. Values of sparse targets, cross-entropy and functions of one's
    own go through autograd, others through a closed form, whose passes over the vocabulary `torch.compile` joins.

    Return the statistics, and the gradient `[C, W]` of the sum that `weights_C` make of the values with respect to the draft's
    logits, in their dtype; None without weights. `labels_C` are **draft** ids, negative for none.
    """
    form = closed_form(divergence) if isinstance(target, DenseChunk) else None
    own = {"temperature": temperature, "draft_token_ids_W": draft_token_ids_W}
    num_rows, num_columns = draft_logits_CW.shape
    near = keeps_small_tensors_near(draft_logits_CW.device)
    if compiled is None:
        compiled = form is not None and (not near or num_columns >= COMPILED_COLUMNS) and has_compiler(draft_logits_CW.device)
    if form is not None and compiled:
        # Without weights the gradient is made for nothing, but by the same graph.
        ones_C = draft_logits_CW.new_ones(num_rows, dtype=torch.float32) if weights_C is None else weights_C
        statistics, gradient = _compiled()(form, target, draft_logits_CW, labels_C, ones_C, **own)
        return statistics, None if weights_C is None else gradient
    size = max(1, TILE_BYTES // (4 * max(num_columns, target.num_columns)) if near else num_rows)
    gradient_CW = None if weights_C is None else torch.empty_like(draft_logits_CW)
    tiles = []
    for start in range(0, max(1, num_rows), size):  # a chunk of no rows is a tile, too
        rows = slice(start, start + size)
        tile, draft_RW = target.at(rows), at_least_float32(draft_logits_CW[rows])
        labels_R = None if labels_C is None else labels_C[rows]
        if form is not None:
            statistics_R, gradient_RW = _by_closed_form(form, tile, draft_RW, labels_R, **own)
        else:
            statistics_R, gradient_RW = _by_autograd(divergence, tile, draft_RW, labels_R, weights_C is not None, **own)
        tiles.append(statistics_R)
        if weights_C is not None and gradient_CW is not None:
            torch.mul(gradient_RW, weights_C[rows].unsqueeze(-1), out=gradient_CW[rows])
    return RowStatistics(*map(torch.cat, zip(*tiles, strict=True))), gradient_CW


def _by_closed_form(
    form: ClosedForm, tile: TargetChunk, draft_RW: Tensor, labels_R: Tensor | None, **own: Any
) -> tuple[RowStatistics, Tensor]:
    """Return the statistics of float32 rows, and the gradient of the sum of their values."""
    pair = tile.pair(draft_RW, labels=labels_R, **own)
    values_R, gradient_RW = form(pair)
    return _statistics(tile, pair, draft_RW, values_R, **own), gradient_RW


def _by_autograd(
    divergence: Divergence, tile: TargetChunk, draft_RW: Tensor, labels_R: Tensor | None, wanted: bool, **own: Any
) -> tuple[RowStatistics, Tensor]:
    """The same through autograd; the gradient holds anything where it is not wanted."""
    leaf_RW = gradient_RW = draft_RW.detach().requires_grad_(wanted)
    with torch.set_grad_enabled(wanted):
        pair = tile.pair(leaf_RW, labels=labels_R, **own)
        values_R = divergence(pair)
        if wanted:
            (gradient_RW,) = torch.autograd.grad(values_R.sum(), leaf_RW)
    with torch.no_grad():
        return _statistics(tile, pair, draft_RW, values_R.detach(), **own), gradient_RW


def _statistics(
    tile: TargetChunk, pair: Pair, draft_RW: Tensor, values_R: Tensor, *, temperature: float, draft_token_ids_W: Tensor | None
) -> RowStatistics:
    at_one = pair if temperature == 1 else tile.pair(draft_RW, draft_token_ids_W=draft_token_ids_W)
    draft_top_R = greedy_token(draft_RW)
    top1_agrees_R = tile.top1_C == (draft_top_R if draft_token_ids_W is None else draft_token_ids_W[draft_top_R])
    return RowStatistics(values_R, acceptance(at_one), top1_agrees_R)


@cache
def _compiled() -> Callable[..., tuple[RowStatistics, Tensor]]:
    return torch.compile(_whole_chunk, fullgraph=True)


def _whole_chunk(
    form: ClosedForm, target: DenseChunk, draft_CW: Tensor, labels_C: Tensor | None, weights_C: Tensor, **own: Any
) -> tuple[RowStatistics, Tensor]:
    """Return what `compare` does, of all rows in one tile."""
    tile = DenseChunk(logits_CX=at_least_float32(target.logits_CX), known=target.known)
    statistics_C, gradient_CW = _by_closed_form(form, tile, at_least_float32(draft_CW), labels_C, **own)
    return statistics_C, (gradient_CW * weights_C.unsqueeze(-1)).to(draft_CW.dtype)


def _draft_ids(labels_N: Tensor | None, draft_token_ids_W: Tensor | None) -> Tensor | None:
    """Return the draft's id of each label, -1 for none and for what the draft vocabulary leaves out."""
    if labels_N is None or draft_token_ids_W is None:
        return labels_N
    sorted_W, order_W = draft_token_ids_W.sort()
    places_N = torch.searchsorted(sorted_W, labels_N).clamp(max=len(sorted_W) - 1)
    return torch.where(sorted_W[places_N] == labels_N, order_W[places_N], -1)

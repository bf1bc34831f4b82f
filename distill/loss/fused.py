"""The distillation loss from hidden states, a few positions at a time, so that no `[positions, vocabulary]` tensor ever lives.

For each chunk of the target's rows: its logits; then, for each part of the loss with rows there, the draft's logits, divergence
and gradient (`distill.loss.divergences`), and back through the draft's head. One autograd function does this in its forward,
where the logits exist anyway, and keeps only the gradients with respect to the draft's hidden states and heads, which its
backward multiplies with the incoming gradient. Value and gradients are those of the loss in one piece.

Row n stands at some position t and predicts token t+1. P rows of the target, N rows of a part, C rows of one chunk, D width of
the draft, E of the target, V target vocabulary, W draft vocabulary.

Where processes hold weights in parts (FSDP, ZeRO-3), the head's must be whole during the call and, where trained, when its
gradient arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional
from transformers import PreTrainedModel

from distill.loss.divergences import Divergence, acceptance, at_least_float32, make_pair
from heads.device import has_compiler, keeps_small_tensors_near, upload
from heads.inference.causal_lm import head_logits
from heads.modules.interface import Normalisers
from heads.modules.output_head import autocast_dtype
from heads.sampling.draws import greedy_token

# Columns from which on a CPU's loss is compiled, if it is not said: with fewer, compiling takes longer than it saves.
COMPILED_COLUMNS = 1024
# Rows of a chunk where none are given. On a GPU a product of few rows waits for the head's weights.
CHUNK_ON_CPU, CHUNK = 128, 2048
TILE_ROWS = 16  # rows whose float32 copy stays in a CPU's cache


@dataclass(frozen=True, kw_only=True)
class LogitHead:
    """A function from hidden states to logits, row by row.

    logits_of: `[C, D]` -> `[C, V]`, in the dtype that the matmul gives (bfloat16 under autocast).
    parameters: every tensor inside `logits_of` that may want a gradient. One left out silently gets none.
    """

    logits_of: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]


def model_head(model: PreTrainedModel, num_tokens: int | None = None) -> LogitHead:
    """Return the head of a causal LM, with the soft cap or scale of its architecture; tied or not makes no difference.

    Valid for one batch: frozen weights are cast for autocast here, once for all chunks. `num_tokens`: without padded rows
    beyond them.
    """
    head = cast(PreTrainedModel, _CastHead(model))  # `head_logits` reads the config and the output embeddings only
    parameters = tuple(model.get_output_embeddings().parameters())
    return LogitHead(logits_of=lambda hidden_CD: head_logits(head, hidden_CD)[..., :num_tokens], parameters=parameters)


class _CastHead:
    """A causal LM's head with its frozen weights in autocast's dtype; autocast itself caches trained weights only.

    A linear head is applied without running its module: FSDP and ZeRO-3 gather weights whenever a module runs, in all
    processes together, and processes may have different numbers of chunks.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.config, self._head = model.config, model.get_output_embeddings()
        named = {name: (weight, autocast_dtype(weight)) for name, weight in self._head.named_parameters()}
        self._weights = {name: weight if dtype is None else weight.to(dtype) for name, (weight, dtype) in named.items()}
        self.weight = getattr(self._head, "weight", None)  # by whose dtype `apply_head` casts the states

    def get_output_embeddings(self) -> _CastHead:
        return self

    def __call__(self, hidden: Tensor) -> Tensor:
        if type(self._head) is not nn.Linear:
            return functional_call(self._head, self._weights, (hidden,))
        return functional.linear(hidden, self._weights["weight"], self._weights.get("bias"))


@dataclass(frozen=True, kw_only=True)
class TargetRows:
    """The target's next-token distributions at P rows: final states and the head that makes logits of some of them.

    With `known`, log-sums and likeliest tokens over all V tokens, `logits_of` gives the W logits of a reduced draft vocabulary
    alone: exact, at temperature 1, and a matrix product of W rows.
    """

    hidden_PE: Tensor
    logits_of: Callable[[Tensor], Tensor]
    known: Normalisers | None = None  # of the P rows


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """Rows of a loss that are predicted by one head, as one depth of a draft is.

    Args:
        hidden_ND: final, normed hidden states of the draft.
        head: its output may have W columns, see `token_ids_W` of `fused_loss`.
        weights_N: what each row's value is multiplied with. Rows of weight 0 count for nothing, but are computed, since finding
            them would make the host wait: their logits must be finite.
        places_N: int64 in host memory, which of the target's rows each one is compared with, rising.
        labels_N: int64, **target** ids of token t+1, negative for none; for `cross_entropy`. A label that the draft
            vocabulary leaves out counts as none.
    """

    hidden_ND: Tensor
    head: LogitHead
    weights_N: Tensor
    places_N: Tensor
    labels_N: Tensor | None = None


class RowStatistics(NamedTuple):
    """Of N rows, detached; 0 and False where the weight is 0.

    values_N: the divergence.
    acceptance_N: sum_v min(p, q) at temperature 1, exact; mass outside the draft vocabulary counts as rejected.
    top1_agrees_N: bool, whether draft and target have the same most likely token: acceptance under greedy decoding.
    """

    values_N: Tensor
    acceptance_N: Tensor
    top1_agrees_N: Tensor


def rows_of_chunk(given: int | None, *, on_cpu: bool) -> int:
    """Return how many rows' logits live at one time, by `LossConfig.chunk_size`."""
    return (CHUNK_ON_CPU if on_cpu else CHUNK) if given is None else given


def fused_loss(
    target: TargetRows,
    parts: Sequence[DraftRows],
    divergence: Divergence,
    *,
    chunk_size: int,
    temperature: float = 1.0,
    token_ids_W: Tensor | None = None,
    compiled: bool | None = None,
) -> tuple[Tensor, list[RowStatistics]]:
    """Return the weighted sum of a divergence over the rows of all parts, and each part's statistics.

    Weights of 0, or no rows, yield a loss of 0 that still has a (zero) gradient, so that under DDP a rank without labels takes
    part in the reduction. `chunk_size` changes memory and speed, never the result. `temperature` divides both sides' logits in
    the divergence. `token_ids_W`, int64, is the target's id of each draft token (d2t); None where the vocabularies are one.
    `ValueError` where sides cannot be paired. `compiled` as in `LossConfig`.
    """
    parameters = list({id(each): each for part in parts for each in part.head.parameters}.values())
    inputs = [*(part.hidden_ND for part in parts), *parameters]
    if not torch.is_grad_enabled():  # checked here: inside the function's forward gradients are always off
        inputs = [tensor.detach() for tensor in inputs]
    compare_rows = partial(compare, divergence, temperature=temperature, token_ids_W=token_ids_W, compiled=compiled)
    loss, *statistics = _FusedLoss.apply(target, parts, compare_rows, token_ids_W, chunk_size, parameters, *inputs)
    return loss, [RowStatistics(*statistics[start : start + 3]) for start in range(0, len(statistics), 3)]


class _FusedLoss(torch.autograd.Function):
    """Computes the loss and, while the logits of a chunk are there, its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        target: TargetRows,
        parts: Sequence[DraftRows],
        compare_rows: Callable[..., tuple[RowStatistics, Tensor]],
        token_ids_W: Tensor | None,
        chunk_size: int,
        parameters: list[Tensor],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        wanted = ctx.needs_input_grad[6:]
        device, wide = inputs[0].device, torch.promote_types(inputs[0].dtype, torch.float32)
        places = upload(torch.cat([part.places_N for part in parts]), device).split([len(part.places_N) for part in parts])
        grad_of = {  # of each trained parameter, by its id
            id(each): torch.zeros_like(each, dtype=wide)
            for each, wants in zip(parameters, wanted[len(parts) :], strict=True)
            if wants
        }
        running = [_Part(*each, token_ids_W, grad_of, wide) for each in zip(parts, inputs, places, wanted, strict=False)]
        for start in range(0, len(target.hidden_PE), chunk_size):
            target_CX = target.logits_of(target.hidden_PE[start : start + chunk_size])
            for part in running:
                part.add(target_CX, start, target.known, compare_rows)
        made = [*(part.grad_hidden_ND for part in running), *(grad_of.get(id(each)) for each in parameters)]
        ctx.wanted_dtypes = [None if each is None else own.dtype for own, each in zip(inputs, made, strict=True)]
        ctx.save_for_backward(*(each for each in made if each is not None))
        statistics = [values for part in running for values in part.statistics]
        ctx.mark_non_differentiable(*statistics)
        return torch.stack([(part.weights_N * part.statistics.values_N).sum() for part in running]).sum(), *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = iter(ctx.saved_tensors)
        wanted = ((next(gradients) * grad_loss).to(dtype) if dtype is not None else None for dtype in ctx.wanted_dtypes)
        return None, None, None, None, None, None, *wanted


class _Part:
    """Rows of the loss whose chunks are added up: their statistics, and gradients of states and, in `grad_of`, of the head."""

    def __init__(
        self,
        rows: DraftRows,
        hidden_ND: Tensor,
        places_N: Tensor,
        wants_hidden: bool,
        token_ids_W: Tensor | None,
        grad_of: dict[int, Tensor],
        wide: torch.dtype,
    ) -> None:
        self.rows, self.hidden_ND, self.places_N, self.grad_of = rows, hidden_ND, places_N, grad_of
        self.trained = [each for each in rows.head.parameters if id(each) in grad_of]
        self.weights_N = rows.weights_N.detach().to(wide)
        self.labels_N = _draft_ids(rows.labels_N, token_ids_W)
        values_N, acceptance_N = torch.zeros_like(self.weights_N), torch.zeros_like(self.weights_N)
        self.statistics = RowStatistics(values_N, acceptance_N, torch.zeros_like(values_N, dtype=torch.bool))
        self.grad_hidden_ND = torch.zeros_like(hidden_ND) if wants_hidden else None

    def add(
        self,
        target_CX: Tensor,
        start: int,
        known: Normalisers | None,
        compare_rows: Callable[..., tuple[RowStatistics, Tensor]],
    ) -> None:
        """Compare the rows at a chunk of the target's, which begins at `start`."""
        ends = torch.searchsorted(self.rows.places_N, torch.tensor([start, start + len(target_CX)]))
        rows = slice(*ends.tolist())
        if rows.start == rows.stop:
            return
        at_C, wants_hidden = self.places_N[rows], self.grad_hidden_ND is not None
        hidden_CD = self.hidden_ND[rows].detach().requires_grad_(wants_hidden)
        leaves = [hidden_CD, *self.trained] if wants_hidden else self.trained
        with torch.set_grad_enabled(bool(leaves)):
            logits_CW = self.rows.head.logits_of(hidden_CD)
        found, gradient_CW = compare_rows(
            target_CX if len(at_C) == len(target_CX) else target_CX[at_C - start],
            logits_CW.detach(),
            self.weights_N[rows],
            known=None if known is None else (known.log_sum_P[at_C], known.top1_P[at_C]),
            labels_C=None if self.labels_N is None else self.labels_N[rows],
        )
        for kept_N, found_C in zip(self.statistics, found, strict=True):
            kept_N[rows] = torch.where(self.weights_N[rows] != 0, found_C.to(kept_N.dtype), 0)
        if not leaves:
            return
        with torch.autocast(hidden_CD.device.type, enabled=False):  # as everywhere, autocast belongs to the forward alone
            gradients = list(torch.autograd.grad(logits_CW, leaves, gradient_CW))
        if self.grad_hidden_ND is not None:
            self.grad_hidden_ND[rows] = gradients.pop(0)
        for each, gradient in zip(self.trained, gradients, strict=True):
            self.grad_of[id(each)].add_(gradient)


def compare(
    divergence: Divergence,
    target_CX: Tensor,
    draft_CW: Tensor,
    weights_C: Tensor,
    *,
    known: tuple[Tensor, Tensor] | None = None,
    labels_C: Tensor | None = None,
    temperature: float = 1.0,
    token_ids_W: Tensor | None = None,
    compiled: bool | None = None,
) -> tuple[RowStatistics, Tensor]:
    """Compare target and draft at the rows of a chunk, in passes over the vocabulary that `torch.compile` joins.

    Return the statistics, and the gradient `[C, W]` of the sum that `weights_C` make of the values with respect to the draft's
    logits, in their dtype. `known`: log-sums and likeliest tokens of the target's rows. `labels_C` are **draft** ids.
    """
    if compiled is None:
        near = keeps_small_tensors_near(draft_CW.device)
        compiled = (not near or draft_CW.shape[-1] >= COMPILED_COLUMNS) and has_compiler(draft_CW.device)
    log_sum_C, top1_C = (None, None) if known is None else known
    run = _compiled() if compiled else _compare
    return run(divergence, target_CX, draft_CW, weights_C, log_sum_C, top1_C, labels_C, temperature, token_ids_W)


def _compare(
    divergence: Divergence,
    target_CX: Tensor,
    draft_CW: Tensor,
    weights_C: Tensor,
    log_sum_C: Tensor | None,
    top1_C: Tensor | None,
    labels_C: Tensor | None,
    temperature: float,
    token_ids_W: Tensor | None,
) -> tuple[RowStatistics, Tensor]:
    target_CX, wide_CW = at_least_float32(target_CX), at_least_float32(draft_CW)
    sides = partial(make_pair, target_CX, wide_CW, log_sum_C=log_sum_C, token_ids_W=token_ids_W)
    pair = sides(temperature=temperature, labels=labels_C)
    values_C, gradient_CW = divergence(pair)
    draft_top_C = greedy_token(wide_CW)
    agrees_C = (greedy_token(target_CX) if top1_C is None else top1_C) == (
        draft_top_C if token_ids_W is None else token_ids_W[draft_top_C]
    )
    statistics = RowStatistics(values_C, acceptance(pair if temperature == 1 else sides()), agrees_C)
    return statistics, (gradient_CW * weights_C.unsqueeze(-1)).to(draft_CW.dtype)


@cache
def _compiled() -> Callable[..., tuple[RowStatistics, Tensor]]:
    return torch.compile(_compare, fullgraph=True)


def _draft_ids(labels_N: Tensor | None, token_ids_W: Tensor | None) -> Tensor | None:
    """Return the draft's id of each label, -1 for none and for what the draft vocabulary leaves out."""
    if labels_N is None or token_ids_W is None:
        return labels_N
    sorted_W, order_W = token_ids_W.sort()
    places_N = torch.searchsorted(sorted_W, labels_N).clamp(max=len(sorted_W) - 1)
    return torch.where(sorted_W[places_N] == labels_N, order_W[places_N], -1)


@torch.no_grad()
def normalise(model: PreTrainedModel, hidden_PE: Tensor, *, chunk_size: int) -> Normalisers:
    """Return log-sums and likeliest tokens of the logits of final states, a few rows at a time."""
    sums, tops = [at_least_float32(hidden_PE.new_zeros(0))], [torch.zeros(0, dtype=torch.int64, device=hidden_PE.device)]
    for hidden_CE in hidden_PE.split(chunk_size) if len(hidden_PE) else ():
        logits_CV = head_logits(model, hidden_CE)
        size = TILE_ROWS if keeps_small_tensors_near(logits_CV.device) else chunk_size
        for logits_RV in logits_CV.split(size):
            sums.append(at_least_float32(logits_RV).logsumexp(-1))
            tops.append(greedy_token(logits_RV))
    return Normalisers(log_sum_P=torch.cat(sums), top1_P=torch.cat(tops))

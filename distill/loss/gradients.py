"""Draft and target compared at the rows of one chunk: divergence, its gradient with respect to the draft's logits, acceptance.

Between the heads and the divergences: `distill.loss.chunked` brings both sides' logits, a few rows of them are made a `Pair`
and handed to a closed form (`distill.loss.gradients`), or to autograd where there is none. Few rows, because on a CPU a pass
over the vocabulary costs ten times as much once its tensors fall out of the cache and the system takes the memory back.

C rows of one chunk, R of them at a time, V target vocabulary, W draft vocabulary.


Divergences together with their gradients with respect to the draft's logits, where both are known in closed form.

`distill.loss.divergences` defines the divergences, as functions that autograd can follow. The chunked loss needs value and
gradient of each position once, and takes both from here in one go (`distill.loss.gradients`): fewer passes over the
vocabulary, no graph. A divergence need not be here. One that is not, a mix that holds one, and sparse pairs go through
autograd.

The draft's logits x enter by log q = x / T - log sum exp(x / T), so a divergence whose derivative with respect to each log q_v
is s_v has the gradient (s - q sum s) / T. C buckets of a dense pair, `...` any leading dims.

Left out on purpose: cross-entropy, which stays at temperature 1 while q does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from distill.loss import divergences as losses
from distill.loss.divergences import LOG_ZERO, Divergence, Mix, Pair, acceptance, at_least_float32
from distill.loss.target_logits import TargetChunk

# Takes a dense pair; returns the divergence `[...]` and its gradient `[..., C]` with respect to the draft's logits.
ClosedForm = Callable[[Pair], tuple[Tensor, Tensor]]


def closed_form(divergence: Divergence) -> ClosedForm | None:
    """Return what computes a divergence and its gradient at once, or None where that is not known.

    Args:
        divergence: a function of `distill.loss.divergences`, a `functools.partial` of one that sets its keywords, or a `Mix`
            of these.
    """
    if isinstance(divergence, Mix):
        return _mixed(divergence)
    if isinstance(divergence, partial):
        form = CLOSED_FORMS.get(divergence.func)
        return None if form is None else partial(form, *divergence.args, **divergence.keywords)
    return CLOSED_FORMS.get(divergence)


def forward_kl(pair: Pair) -> tuple[Tensor, Tensor]:
    """The gradient is T (q - p); what the draft masks (log q cut off at `LOG_ZERO`) pulls at nothing, as under autograd."""
    p = torch.where(pair.log_q > LOG_ZERO, pair.p_within, 0)
    gradient = (pair.q * p.sum(-1, keepdim=True)).sub_(p)
    return losses.forward_kl(pair), _times(gradient, pair.temperature)


def reverse_kl(pair: Pair) -> tuple[Tensor, Tensor]:
    """The gradient is T q (log q/p - KL)."""
    weighted = (pair.log_q - pair.log_p_within).mul_(pair.q)
    kl = weighted.sum(-1)
    gradient = weighted.addcmul_(pair.q, kl.unsqueeze(-1), value=-1)
    return pair.temperature**2 * kl, _times(gradient, pair.temperature)


def jsd(pair: Pair, *, beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """The gradient is T q (log q/m - KL(q || m)) / beta: that of the draft's side alone, as if m were constant."""
    if not 0 < beta < 1:
        return (reverse_kl if beta == 1 else forward_kl)(pair)
    m = torch.lerp(pair.q, pair.p_within, beta)
    log_m = m.clamp_(min=torch.finfo(m.dtype).tiny).log_()  # where even m is 0 so are p and q, and 0 * -inf would be NaN
    target_side = (pair.log_p_within - log_m).mul_(pair.p_within).sum(-1)
    weighted = torch.sub(pair.log_q, log_m, out=log_m).mul_(pair.q)
    draft_side = weighted.sum(-1)
    gradient = weighted.addcmul_(pair.q, draft_side.unsqueeze(-1), value=-1)
    values = pair.temperature**2 * (target_side / (1 - beta) + draft_side / beta)
    return values, _times(gradient, pair.temperature / beta)


def total_variation(pair: Pair) -> tuple[Tensor, Tensor]:
    """The gradient is q (s - sum q s) / 2T, where s is the sign of q - p."""
    sign = (pair.q - pair.p).sign_()
    mean_sign = (pair.q * sign).sum(-1, keepdim=True)
    return losses.total_variation(pair), _times(sign.sub_(mean_sign).mul_(pair.q), 0.5 / pair.temperature)


def negative_log_acceptance(pair: Pair) -> tuple[Tensor, Tensor]:
    """The gradient is (q sum r - r) / T, where r is min(p, q) / acceptance at the tokens with q < p (half of it at q = p)."""
    log_least = torch.minimum(pair.log_p, pair.log_q)
    log_acceptance = log_least.logsumexp(-1)
    is_least = torch.heaviside(pair.log_p - pair.log_q, pair.log_p.new_tensor(0.5))
    r = log_least.sub_(log_acceptance.unsqueeze(-1)).exp_().mul_(is_least)
    return -log_acceptance, _times((pair.q * r.sum(-1, keepdim=True)).sub_(r), 1 / pair.temperature)


def kl_tv_blend(pair: Pair, *, eta: float = 3.0, mean_acceptance: float | Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gradient is the blend of the two gradients: the weight is a constant."""
    weight = losses.blend_weight(pair, eta, mean_acceptance)
    kl, gradient_of_kl = forward_kl(pair)
    distance, gradient_of_distance = total_variation(pair)
    column = weight.unsqueeze(-1)
    return torch.lerp(distance, kl, weight), torch.lerp(gradient_of_distance, gradient_of_kl, column)


CLOSED_FORMS: dict[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]] = {
    losses.forward_kl: forward_kl,
    losses.reverse_kl: reverse_kl,
    losses.jsd: jsd,
    losses.total_variation: total_variation,
    losses.negative_log_acceptance: negative_log_acceptance,
    losses.kl_tv_blend: kl_tv_blend,
}


def _mixed(mix: Mix) -> ClosedForm | None:
    """Return the closed form of a mix, which is there where every part has one."""
    parts = [(form, weight) for divergence, weight in mix.parts if (form := closed_form(divergence)) is not None]
    if len(parts) < len(mix.parts):
        return None

    def mixed(pair: Pair) -> tuple[Tensor, Tensor]:
        values, gradients = zip(*(form(pair) for form, _ in parts), strict=True)
        weights = [weight for _, weight in parts]
        total, gradient = weights[0] * values[0], _times(gradients[0], weights[0])
        for weight, value, other in zip(weights[1:], values[1:], gradients[1:], strict=True):
            total, gradient = total + weight * value, gradient.add_(other, alpha=weight)
        return total, gradient

    return mixed


def _times(gradient: Tensor, factor: float) -> Tensor:
    """Multiply in place, where there is anything to multiply with: a pass over the vocabulary is not free."""
    return gradient if factor == 1 else gradient.mul_(factor)


# Bytes of a float32 tensor over the vocabulary, about ten of which are in use at a time: they should stay in the cache.
# Of 0.6 to 80 MB, 1 to 2 were fastest on one core with 1 MiB of L2 and 32 MiB of shared L3 cache.
TILE_BYTES = 2**21


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How two sides are compared, the same for all chunks; see `distill.loss.chunked.chunked_loss_against`."""

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

"""The divergence of a chunk of rows and its gradient with respect to the draft's logits.

`distill.loss.chunked` passes the logits of one chunk to `compare`, which goes through them a tile of rows at a time: on a CPU
a pass over the vocabulary costs ten times as much once its tensors no longer fit into the cache. Where the divergence has a
closed form below, value and gradient come from that, in fewer passes over the vocabulary and without a graph; sparse targets,
cross-entropy (which stays at temperature 1) and functions of one's own go through autograd.

The draft's logits x enter by log q = x / T - log sum exp(x / T), so a divergence whose derivative with respect to each log q_v
is s_v has the gradient (s - q sum s) / T.
C rows of one chunk, R rows of a tile, V target vocabulary, W draft vocabulary; `...` any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from distill.loss import divergences
from distill.loss.divergences import LOG_ZERO, Divergence, Mix, Pair, acceptance, at_least_float32
from distill.loss.target_logits import TargetChunk

# Takes a dense pair; returns the divergence `[...]` and its gradient `[..., W]` with respect to the draft's logits.
ClosedForm = Callable[[Pair], tuple[Tensor, Tensor]]

# Bytes of a float32 tensor over the vocabulary, about ten of which are in use at a time: they should stay in the cache.
# Of 0.6 to 80 MB, 1 to 2 were fastest on one core with 1 MiB of L2 and 32 MiB of shared L3 cache.
TILE_BYTES = 2**21


class RowStatistics(NamedTuple):
    """What is measured at each of C rows, without a graph.

    values_C: the divergence.
    acceptance_C: sum_v min(p, q) at temperature 1.
    top1_agrees_C: bool, whether the most likely tokens agree.
    """

    values_C: Tensor
    acceptance_C: Tensor
    top1_agrees_C: Tensor


def compare(
    divergence: Divergence,
    target: TargetChunk,
    draft_logits_CW: Tensor,
    weights_C: Tensor | None,
    *,
    temperature: float = 1.0,
    draft_token_ids_W: Tensor | None = None,
    labels_C: Tensor | None = None,
) -> tuple[RowStatistics, Tensor | None]:
    """Compare target and draft at the rows of a chunk.

    Args:
        divergence: a function of `distill.loss.divergences`, a `functools.partial` of one, or a mix.
        target: its distribution at these rows.
        draft_logits_CW: any float type, without a graph.
        weights_C: what each row's value is multiplied with in the sum that the gradient is of; None: no gradient.
        temperature: divides both sides' logits in the divergence.
        draft_token_ids_W: int64, the target's id of each draft token; None where the vocabularies are one.
        labels_C: **draft** ids, negative for none; for `cross_entropy`.

    Returns:
        The statistics, and the gradient `[C, W]` of the weighted sum of values with respect to the draft's logits, in their
        dtype, or None.
    """
    gradient_CW = None if weights_C is None else torch.empty_like(draft_logits_CW)
    tiles = []
    for rows in _tiles(draft_logits_CW, target):
        statistics_R, gradient_RW = _compare_tile(
            divergence,
            target.part(rows),
            at_least_float32(draft_logits_CW[rows]),
            None if labels_C is None else labels_C[rows],
            temperature,
            draft_token_ids_W,
            wants_gradient=weights_C is not None,
        )
        tiles.append(statistics_R)
        if weights_C is not None and gradient_CW is not None:
            torch.mul(gradient_RW, weights_C[rows].unsqueeze(-1), out=gradient_CW[rows])
    return RowStatistics(*map(torch.cat, zip(*tiles, strict=True))), gradient_CW


def _compare_tile(
    divergence: Divergence,
    target: TargetChunk,
    draft_RW: Tensor,
    labels_R: Tensor | None,
    temperature: float,
    ids_W: Tensor | None,
    *,
    wants_gradient: bool,
) -> tuple[RowStatistics, Tensor]:
    """Return the statistics of a tile, and the gradient `[R, W]` of its values; that is empty where not wanted."""
    form = closed_form(divergence) if target.is_dense else None
    by_autograd = wants_gradient and form is None
    leaf_RW = draft_RW.detach().requires_grad_(by_autograd)
    with torch.set_grad_enabled(by_autograd):
        pair = target.pair(leaf_RW, temperature=temperature, draft_token_ids_W=ids_W, labels=labels_R)
        values_R, gradient_RW = (divergence(pair), leaf_RW.new_empty(0)) if form is None else form(pair)
        if by_autograd:
            (gradient_RW,) = torch.autograd.grad(values_R.sum(), leaf_RW)
    with torch.no_grad():
        at_one = pair if temperature == 1 else target.pair(draft_RW, temperature=1.0, draft_token_ids_W=ids_W)
        acceptance_R = acceptance(at_one)
    draft_top_R = draft_RW.argmax(-1)
    top1_agrees_R = target.top1_C == (draft_top_R if ids_W is None else ids_W[draft_top_R])
    return RowStatistics(values_R.detach(), acceptance_R, top1_agrees_R), gradient_RW


def _tiles(draft_logits_CW: Tensor, target: TargetChunk) -> Iterator[slice]:
    """Yield the rows of each tile; on a GPU all of them at once, since small tensors would only add launches."""
    num_rows, num_columns = draft_logits_CW.shape
    bytes_per_row = 4 * max(num_columns, target.num_columns)
    size = max(1, TILE_BYTES // bytes_per_row if draft_logits_CW.device.type == "cpu" else num_rows)
    for start in range(0, max(1, num_rows), size):  # a chunk of no rows is a tile, too
        yield slice(start, start + size)


# --- closed forms -------------------------------------------------------------------------------------------------


def closed_form(divergence: Divergence) -> ClosedForm | None:
    """Return the function that computes a divergence and its gradient at once, or None where there is none.

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
    return divergences.forward_kl(pair), _times(gradient, pair.temperature)


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
    return divergences.total_variation(pair), _times(sign.sub_(mean_sign).mul_(pair.q), 0.5 / pair.temperature)


def negative_log_acceptance(pair: Pair) -> tuple[Tensor, Tensor]:
    """The gradient is (q sum r - r) / T, where r is min(p, q) / acceptance at the tokens with q < p (half of it at q = p)."""
    log_least = torch.minimum(pair.log_p, pair.log_q)
    log_acceptance = log_least.logsumexp(-1)
    is_least = torch.heaviside(pair.log_p - pair.log_q, pair.log_p.new_tensor(0.5))
    r = log_least.sub_(log_acceptance.unsqueeze(-1)).exp_().mul_(is_least)
    return -log_acceptance, _times((pair.q * r.sum(-1, keepdim=True)).sub_(r), 1 / pair.temperature)


def kl_tv_blend(pair: Pair, *, eta: float = 3.0, mean_acceptance: float | Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gradient is the blend of the two gradients: the weight is a constant."""
    weight = divergences.blend_weight(pair, eta, mean_acceptance)
    kl, gradient_of_kl = forward_kl(pair)
    distance, gradient_of_distance = total_variation(pair)
    column = weight.unsqueeze(-1)
    return torch.lerp(distance, kl, weight), torch.lerp(gradient_of_distance, gradient_of_kl, column)


CLOSED_FORMS: dict[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]] = {
    divergences.forward_kl: forward_kl,
    divergences.reverse_kl: reverse_kl,
    divergences.jsd: jsd,
    divergences.total_variation: total_variation,
    divergences.negative_log_acceptance: negative_log_acceptance,
    divergences.kl_tv_blend: kl_tv_blend,
}


def _mixed(mix: Mix) -> ClosedForm | None:
    """Return the closed form of a mix, None unless every part has one."""
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

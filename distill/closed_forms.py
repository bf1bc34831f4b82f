"""Divergences together with their gradients with respect to the draft's logits, where both are known in closed form.

`distill.losses` defines the divergences, as functions that autograd can follow. The chunked loss needs value and gradient of
each position once, and takes both from here in one go (`distill.comparison`): fewer passes over the vocabulary, no graph.
A divergence need not be here. One that is not, a mix that holds one, and sparse pairs go through autograd.

The draft's logits x enter by log q = x / T - log sum exp(x / T), so a divergence whose derivative with respect to each log q_v
is s_v has the gradient (s - q sum s) / T. C buckets of a dense pair, `...` any leading dims.

Left out on purpose: cross-entropy, which stays at temperature 1 while q does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from distill import losses
from distill.losses import LOG_ZERO, Divergence, Mix, Pair

# Takes a dense pair; returns the divergence `[...]` and its gradient `[..., C]` with respect to the draft's logits.
ClosedForm = Callable[[Pair], tuple[Tensor, Tensor]]


def closed_form(divergence: Divergence) -> ClosedForm | None:
    """Return what computes a divergence and its gradient at once, or None where that is not known.

    Args:
        divergence: a function of `distill.losses`, a `functools.partial` of one that sets its keywords, or a `Mix` of these.
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

"""Divergences between the target's next-token distribution p and the draft's q: one function each, one value per position.

A divergence takes a `distill.loss.pairs.Pair` and returns `[...]` values. To add one, add a function and its name in
`DIVERGENCES`; autograd differentiates it. Where the gradient is known in closed form, a second function below gives value and
gradient in fewer passes over the vocabulary and without a graph. The draft's logits x enter by log q = x / T - log sum
exp(x / T), so a divergence whose derivative with respect to each log q_v is s_v has the gradient (s - q sum s) / T.
X buckets of a pair, W draft vocabulary; `...` any leading dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from configs.schema.training import LossConfig
from distill.loss.pairs import LOG_ZERO, Pair

Divergence = Callable[[Pair], Tensor]

# Takes a dense pair; returns the divergence `[...]` and its gradient `[..., W]` with respect to the draft's logits.
ClosedForm = Callable[[Pair], tuple[Tensor, Tensor]]


def acceptance(pair: Pair) -> Tensor:
    """Return `[...]` the exact probability that a token drawn from q is accepted: sum_v min(p, q) = 1 - total variation.

    Target mass on tokens that the draft's vocabulary leaves out counts as rejected (p is not renormalised).
    """
    return torch.minimum(pair.p, pair.q).sum(-1)


# --- the KL family ------------------------------------------------------------------------------------------------
# At a high temperature the gradient of these with respect to the logits falls like 1/T^2 (one 1/T from the division, one
# because p - q itself shrinks), and the factor T^2 keeps its size (Hinton et al. 2015). All take p within the
# draft's vocabulary: the draft cannot learn a token that it cannot propose.


def forward_kl(pair: Pair) -> Tensor:
    """Return `[...]` T^2 KL(p || q), in nats. Its gradient with respect to the logits is T (q - p)."""
    return pair.temperature**2 * _kl(pair.p_within, pair.log_p_within, pair.log_q)


def reverse_kl(pair: Pair) -> Tensor:
    """Return `[...]` T^2 KL(q || p), in nats. Its gradient is T q (log q/p - KL)."""
    return pair.temperature**2 * _kl(pair.q, pair.log_q, pair.log_p_within)


def jsd(pair: Pair, *, beta: float = 0.5) -> Tensor:
    """Return `[...]` T^2 JSD / (beta (1 - beta)), in nats.

    JSD = beta KL(p || m) + (1 - beta) KL(q || m), where m = beta p + (1 - beta) q. Departs from GKD (2306.13649, eq. 1) by
    the divisor: without it the value shrinks to nothing towards both ends, and a sweep over beta is a sweep over learning
    rates. With it the ends are the forward (beta 0) and the reverse KL (beta 1), and beta 1/2 is four times the textbook's.
    """
    if beta == 0:
        return forward_kl(pair)
    if beta == 1:
        return reverse_kl(pair)
    log_m = torch.logaddexp(pair.log_p_within + math.log(beta), pair.log_q + math.log1p(-beta))
    target_side = _kl(pair.p_within, pair.log_p_within, log_m) / (1 - beta)
    draft_side = _kl(pair.q, pair.log_q, log_m) / beta
    return pair.temperature**2 * (target_side + draft_side)


# --- the acceptance family ----------------------------------------------------------------------------------------
# No T^2: these are linear in p - q, their gradient falls like 1/T, and the square would overweight them. All see the
# target's own p, so that the mass a reduced draft vocabulary leaves out is counted as the rejections it is.


def total_variation(pair: Pair) -> Tensor:
    """Return `[...]` 1/2 sum_v |p - q| = 1 - acceptance. The gradient vanishes where q does: start from a draft near p."""
    distance = (pair.p - pair.q).abs().sum(-1)
    if pair.log_reach is not None:
        distance = distance + (1 - pair.log_reach.exp())
    return distance / 2


def negative_log_acceptance(pair: Pair) -> Tensor:
    """Return `[...]` -log sum_v min(p, q), in nats: total variation with its gradient divided by the acceptance (LK-alpha).

    Badly matched positions therefore still learn. Computed on log-probabilities, so that it stays finite and has a gradient
    where the acceptance itself underflows.
    """
    return -torch.minimum(pair.log_p, pair.log_q).logsumexp(-1)


def kl_tv_blend(pair: Pair, *, eta: float = 3.0) -> Tensor:
    """Return `[...]` w T^2 KL(p || q) + (1 - w) TV(p, q) with w = exp(-eta alpha), LK-lambda: KL at first, TV later.

    alpha is the position's own acceptance, and w carries no gradient. `eta`, at least 0, says how fast the weight moves away
    from KL; 0 is pure KL.
    """
    weight = torch.exp(-eta * acceptance(pair)).detach()
    return weight * forward_kl(pair) + (1 - weight) * total_variation(pair)


# --- labels and mixes ------------------------------------------------------------------------------------------------


def cross_entropy(pair: Pair) -> Tensor:
    """Return `[...]` -log q(label) at temperature 1, in nats, and 0 where there is no label. Its gradient is q - onehot."""
    if pair.label_log_q is None:
        raise ValueError("cross_entropy needs labels, and this pair was made without")
    return -pair.label_log_q


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "kl_tv_blend": kl_tv_blend,
    "cross_entropy": cross_entropy,
}


@dataclass(frozen=True)
class Mix:
    """The weighted sum of divergences, itself a divergence."""

    parts: Sequence[tuple[Divergence, float]]

    def __call__(self, pair: Pair) -> Tensor:
        return torch.stack([weight * divergence(pair) for divergence, weight in self.parts]).sum(0)


def configured_divergence(config: LossConfig) -> Mix:
    """Return the weighted sum of the divergences that a config names; weights are used as given, not normalised."""
    settings = config.settings.model_dump()
    return Mix([(partial(DIVERGENCES[name], **settings.get(name, {})), weight) for name, weight in config.weights.items()])


# --- closed forms -------------------------------------------------------------------------------------------------


def closed_form(divergence: Divergence) -> ClosedForm | None:
    """Return the function that gives value and gradient of a divergence (a `partial` or `Mix` of some, too), or None."""
    if isinstance(divergence, Mix):
        forms = [closed_form(part) for part, _ in divergence.parts]
        return None if None in forms else partial(_mixed, forms, [weight for _, weight in divergence.parts])
    if isinstance(divergence, partial):
        form = CLOSED_FORMS.get(divergence.func)
        return None if form is None else partial(form, *divergence.args, **divergence.keywords)
    return CLOSED_FORMS.get(divergence)


def forward_kl_with_gradient(pair: Pair) -> tuple[Tensor, Tensor]:
    """The gradient is T (q - p); what the draft masks (log q cut off at `LOG_ZERO`) pulls at nothing, as under autograd."""
    p = torch.where(pair.log_q > LOG_ZERO, pair.p_within, 0)
    gradient = (pair.q * p.sum(-1, keepdim=True)).sub_(p)
    return forward_kl(pair), _times(gradient, pair.temperature)


def reverse_kl_with_gradient(pair: Pair) -> tuple[Tensor, Tensor]:
    """The gradient is T q (log q/p - KL)."""
    weighted = (pair.log_q - pair.log_p_within).mul_(pair.q)
    kl = weighted.sum(-1)
    gradient = weighted.addcmul_(pair.q, kl.unsqueeze(-1), value=-1)
    return pair.temperature**2 * kl, _times(gradient, pair.temperature)


def jsd_with_gradient(pair: Pair, *, beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """The gradient is T q (log q/m - KL(q || m)) / beta: that of the draft's side alone, as if m were constant."""
    if not 0 < beta < 1:
        return (reverse_kl_with_gradient if beta == 1 else forward_kl_with_gradient)(pair)
    m = torch.lerp(pair.q, pair.p_within, beta)
    log_m = m.clamp_(min=torch.finfo(m.dtype).tiny).log_()  # where even m is 0 so are p and q, and 0 * -inf would be NaN
    target_side = (pair.log_p_within - log_m).mul_(pair.p_within).sum(-1)
    weighted = torch.sub(pair.log_q, log_m, out=log_m).mul_(pair.q)
    draft_side = weighted.sum(-1)
    gradient = weighted.addcmul_(pair.q, draft_side.unsqueeze(-1), value=-1)
    values = pair.temperature**2 * (target_side / (1 - beta) + draft_side / beta)
    return values, _times(gradient, pair.temperature / beta)


def total_variation_with_gradient(pair: Pair) -> tuple[Tensor, Tensor]:
    """The gradient is q (s - sum q s) / 2T, where s is the sign of q - p."""
    sign = (pair.q - pair.p).sign_()
    mean_sign = (pair.q * sign).sum(-1, keepdim=True)
    return total_variation(pair), _times(sign.sub_(mean_sign).mul_(pair.q), 0.5 / pair.temperature)


def negative_log_acceptance_with_gradient(pair: Pair) -> tuple[Tensor, Tensor]:
    """The gradient is (q sum r - r) / T, where r is min(p, q) / acceptance at the tokens with q < p (half of it at q = p)."""
    log_least = torch.minimum(pair.log_p, pair.log_q)
    log_acceptance = log_least.logsumexp(-1)
    is_least = torch.heaviside(pair.log_p - pair.log_q, pair.log_p.new_tensor(0.5))
    r = log_least.sub_(log_acceptance.unsqueeze(-1)).exp_().mul_(is_least)
    return -log_acceptance, _times((pair.q * r.sum(-1, keepdim=True)).sub_(r), 1 / pair.temperature)


def kl_tv_blend_with_gradient(pair: Pair, *, eta: float = 3.0) -> tuple[Tensor, Tensor]:
    """The gradient is the blend of the two gradients: the weight is a constant."""
    weight = torch.exp(-eta * acceptance(pair))
    kl, gradient_of_kl = forward_kl_with_gradient(pair)
    distance, gradient_of_distance = total_variation_with_gradient(pair)
    column = weight.unsqueeze(-1)
    return torch.lerp(distance, kl, weight), torch.lerp(gradient_of_distance, gradient_of_kl, column)


CLOSED_FORMS: dict[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]] = {
    forward_kl: forward_kl_with_gradient,
    reverse_kl: reverse_kl_with_gradient,
    jsd: jsd_with_gradient,
    total_variation: total_variation_with_gradient,
    negative_log_acceptance: negative_log_acceptance_with_gradient,
    kl_tv_blend: kl_tv_blend_with_gradient,
}


def _mixed(forms: Sequence[Any], weights: Sequence[float], pair: Pair) -> tuple[Tensor, Tensor]:
    values, gradients = zip(*(form(pair) for form in forms), strict=True)
    total, gradient = weights[0] * values[0], _times(gradients[0], weights[0])
    for weight, value, other in zip(weights[1:], values[1:], gradients[1:], strict=True):
        total, gradient = total + weight * value, gradient.add_(other, alpha=weight)
    return total, gradient


def _times(gradient: Tensor, factor: float) -> Tensor:
    """Multiply in place, where there is anything to multiply with: a pass over the vocabulary is not free."""
    return gradient if factor == 1 else gradient.mul_(factor)


def _kl(a: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    return (a * (log_a - log_b)).sum(-1)

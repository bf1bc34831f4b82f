"""Divergences between the target's next-token distribution p and the draft's q, each with its gradient.

A divergence takes a `Pair` of C positions and returns values `[C]` and the gradient `[C, W]` of their sum with respect to the
draft's logits, in closed form: fewer passes over the vocabulary than autograd's, and no graph. The draft's logits x enter by
log q = x / T - log sum exp(x / T), so a divergence whose derivative with respect to each log q_v is s_v has the gradient
(s - q sum s) / T. To add one, add a function and its name in `DIVERGENCES`. V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from configs.schema.training import LossConfig

# Stands for log 0. Finite, so that 0 * log 0 is 0 and a gradient is never NaN; far below what logits of +-1e4 can reach.
LOG_ZERO = -1e5


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Target and draft at the same positions, in float32 (or float64 where that came in).

    log_p, p: `[C, W]`, without gradient. Sums to less than 1 where the draft's vocabulary leaves tokens of the target out.
    log_q, q: `[C, W]`, sums to 1.
    log_reach: `[C]`, the logarithm of that sum of p; None where it is 1.
    temperature: what both sides' logits were divided by.
    labels: int64 `[C]`, **draft** ids of the next token, negative for none; read by `cross_entropy` only.
    log_q_at_1: log q at temperature 1.
    """

    log_p: Tensor
    p: Tensor
    log_q: Tensor
    q: Tensor
    log_reach: Tensor | None
    temperature: float
    labels: Tensor | None
    log_q_at_1: Tensor

    @property
    def log_p_within(self) -> Tensor:
        """The target's log-probabilities `[C, W]`, given that the token is one the draft can propose."""
        return self.log_p if self.log_reach is None else self.log_p - self.log_reach.unsqueeze(-1)


def make_pair(
    target_CX: Tensor,
    draft_CW: Tensor,
    *,
    log_sum_C: Tensor | None = None,
    token_ids_W: Tensor | None = None,
    temperature: float = 1.0,
    labels: Tensor | None = None,
) -> Pair:
    """Pair the target's logits with the draft's.

    Args:
        target_CX: `[C, V]`; or `[C, W]` of the draft's tokens alone where `log_sum_C`, the log-sum over all V, is given, which
            holds at temperature 1.
        token_ids_W: int64, the target's id of each draft token (d2t); None where the vocabularies are one.
    """
    num_shared = target_CX.shape[-1] if token_ids_W is None else len(token_ids_W)
    if draft_CW.shape[-1] != num_shared:
        raise ValueError(f"the draft has {draft_CW.shape[-1]} logits a position where {num_shared} are expected")
    target = _scaled(target_CX.detach(), temperature)
    if log_sum_C is not None:
        log_p = target - log_sum_C.unsqueeze(-1)
    else:
        log_p = target.log_softmax(-1)
        if token_ids_W is not None:
            log_p = log_p.index_select(-1, token_ids_W)
    is_reduced = log_sum_C is not None or token_ids_W is not None
    log_reach = log_p.logsumexp(-1).clamp(min=LOG_ZERO) if is_reduced else None
    log_p = log_p.clamp_(min=LOG_ZERO)
    log_q = _scaled(draft_CW, temperature).log_softmax(-1).clamp(min=LOG_ZERO)
    log_q_at_1 = log_q
    if temperature != 1 and labels is not None:
        log_q_at_1 = at_least_float32(draft_CW).log_softmax(-1).clamp(min=LOG_ZERO)
    return Pair(
        log_p=log_p,
        p=log_p.exp(),
        log_q=log_q,
        q=log_q.exp(),
        log_reach=log_reach,
        temperature=temperature,
        labels=labels,
        log_q_at_1=log_q_at_1,
    )


Found = tuple[Tensor, Tensor]  # values and gradient
Divergence = Callable[[Pair], Found]


def acceptance(pair: Pair) -> Tensor:
    """Return `[C]` the exact probability that a token drawn from q is accepted: sum_v min(p, q) = 1 - total variation.

    Target mass on tokens that the draft's vocabulary leaves out counts as rejected (p is not renormalised).
    """
    return torch.minimum(pair.p, pair.q).sum(-1)


# --- the KL family ------------------------------------------------------------------------------------------------
# At a high temperature the gradient of these with respect to the logits falls like 1/T^2 (one 1/T from the division, one
# because p - q itself shrinks), and the factor T^2 keeps its size (Hinton et al. 2015). All take p within the
# draft's vocabulary: the draft cannot learn a token that it cannot propose.


def forward_kl(pair: Pair) -> Found:
    """T^2 KL(p || q), in nats; the gradient is T (q - p).

    What the draft masks (log q cut off at `LOG_ZERO`) pulls at nothing.
    """
    log_p = pair.log_p_within
    p = pair.p if pair.log_reach is None else log_p.exp()
    values = pair.temperature**2 * (p * (log_p - pair.log_q)).sum(-1)
    p = torch.where(pair.log_q > LOG_ZERO, p, 0)
    gradient = (pair.q * p.sum(-1, keepdim=True)).sub_(p)
    return values, _times(gradient, pair.temperature)


def reverse_kl(pair: Pair) -> Found:
    """T^2 KL(q || p), in nats; the gradient is T q (log q/p - KL)."""
    weighted = (pair.log_q - pair.log_p_within).mul_(pair.q)
    kl = weighted.sum(-1)
    gradient = weighted.addcmul_(pair.q, kl.unsqueeze(-1), value=-1)
    return pair.temperature**2 * kl, _times(gradient, pair.temperature)


def jsd(pair: Pair, *, beta: float = 0.5) -> Found:
    """T^2 JSD / (beta (1 - beta)), in nats.

    JSD = beta KL(p || m) + (1 - beta) KL(q || m), where m = beta p + (1 - beta) q. Departs from GKD (2306.13649, eq. 1) by
    the divisor: without it the value shrinks to nothing towards both ends, and a sweep over beta is a sweep over learning
    rates. With it the ends are the forward (beta 0) and the reverse KL (beta 1), and beta 1/2 is four times the textbook's.
    The gradient is T q (log q/m - KL(q || m)) / beta: that of the draft's side alone, as if m were constant.
    """
    if not 0 < beta < 1:
        return (reverse_kl if beta == 1 else forward_kl)(pair)
    log_p = pair.log_p_within
    p = pair.p if pair.log_reach is None else log_p.exp()
    m = torch.lerp(pair.q, p, beta)
    log_m = m.clamp_(min=torch.finfo(m.dtype).tiny).log_()  # where even m is 0 so are p and q, and 0 * -inf would be NaN
    target_side = (log_p - log_m).mul_(p).sum(-1)
    weighted = torch.sub(pair.log_q, log_m, out=log_m).mul_(pair.q)
    draft_side = weighted.sum(-1)
    gradient = weighted.addcmul_(pair.q, draft_side.unsqueeze(-1), value=-1)
    values = pair.temperature**2 * (target_side / (1 - beta) + draft_side / beta)
    return values, _times(gradient, pair.temperature / beta)


# --- the acceptance family ----------------------------------------------------------------------------------------
# No T^2: these are linear in p - q, their gradient falls like 1/T, and the square would overweight them. All see the
# target's own p, so that the mass a reduced draft vocabulary leaves out is counted as the rejections it is.


def total_variation(pair: Pair) -> Found:
    """1/2 sum_v |p - q| = 1 - acceptance; the gradient is q (s - sum q s) / 2T, where s is the sign of q - p.

    It vanishes where q does: start from a draft near p.
    """
    difference = pair.q - pair.p
    distance = difference.abs().sum(-1)
    if pair.log_reach is not None:
        distance = distance + (1 - pair.log_reach.exp())
    sign = difference.sign_()
    mean_sign = (pair.q * sign).sum(-1, keepdim=True)
    return distance / 2, _times(sign.sub_(mean_sign).mul_(pair.q), 0.5 / pair.temperature)


def negative_log_acceptance(pair: Pair) -> Found:
    """-log sum_v min(p, q), in nats: total variation with its gradient divided by the acceptance (LK-alpha).

    Badly matched positions therefore still learn. Computed on log-probabilities, so that it stays finite and has a gradient
    where the acceptance itself underflows. The gradient is (q sum r - r) / T, where r is min(p, q) / acceptance at the tokens
    with q < p (half of it at q = p).
    """
    log_least = torch.minimum(pair.log_p, pair.log_q)
    log_acceptance = log_least.logsumexp(-1)
    is_least = torch.heaviside(pair.log_p - pair.log_q, pair.log_p.new_tensor(0.5))
    r = log_least.sub_(log_acceptance.unsqueeze(-1)).exp_().mul_(is_least)
    return -log_acceptance, _times((pair.q * r.sum(-1, keepdim=True)).sub_(r), 1 / pair.temperature)


def kl_tv_blend(pair: Pair, *, eta: float = 3.0) -> Found:
    """w T^2 KL(p || q) + (1 - w) TV(p, q) with w = exp(-eta alpha), LK-lambda: KL at first, TV later.

    alpha is the position's own acceptance, and w, a constant to the gradient, falls with it the faster the larger `eta` is; 0
    is pure KL.
    """
    weight = torch.exp(-eta * acceptance(pair))
    kl, gradient_of_kl = forward_kl(pair)
    distance, gradient_of_distance = total_variation(pair)
    column = weight.unsqueeze(-1)
    return torch.lerp(distance, kl, weight), torch.lerp(gradient_of_distance, gradient_of_kl, column)


# --- labels and mixes ---------------------------------------------------------------------------------------------


def cross_entropy(pair: Pair) -> Found:
    """-log q(label) at temperature 1, in nats, and 0 where there is no label; the gradient is q - onehot."""
    if pair.labels is None:
        raise ValueError("cross_entropy needs labels, and this pair was made without")
    labels, has_label = pair.labels.clamp(min=0).unsqueeze(-1), pair.labels >= 0
    values = torch.where(has_label, -pair.log_q_at_1.gather(-1, labels).squeeze(-1), 0)
    gradient = pair.log_q_at_1.exp()
    gradient = gradient.scatter_add(-1, labels, torch.full_like(gradient[..., :1], -1.0))
    return values, gradient.mul_(has_label.unsqueeze(-1))


DIVERGENCES: dict[str, Callable[..., Found]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "kl_tv_blend": kl_tv_blend,
    "cross_entropy": cross_entropy,
}


def configured_divergence(config: LossConfig) -> Divergence:
    """Return the weighted sum of the divergences that a config names; weights are used as given, not normalised."""
    settings = config.settings.model_dump()
    divergences = [partial(DIVERGENCES[name], **settings.get(name, {})) for name in config.weights]
    return partial(mixed, divergences, list(config.weights.values()))


def mixed(divergences: Sequence[Divergence], weights: Sequence[float], pair: Pair) -> Found:
    """Return the weighted sum of divergences."""
    values, gradients = zip(*(divergence(pair) for divergence in divergences), strict=True)
    total, gradient = weights[0] * values[0], _times(gradients[0], weights[0])
    for weight, value, other in zip(weights[1:], values[1:], gradients[1:], strict=True):
        total, gradient = total + weight * value, gradient.add_(other, alpha=weight)
    return total, gradient


def at_least_float32(values: Tensor) -> Tensor:
    """Return values in float32, or as they are in float64: what a divergence is computed in."""
    return values if values.dtype == torch.float64 else values.float()


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = at_least_float32(logits)
    return wide if temperature == 1 else wide / temperature


def _times(gradient: Tensor, factor: float) -> Tensor:
    """Multiply in place, where there is anything to multiply with: a pass over the vocabulary is not free."""
    return gradient if factor == 1 else gradient.mul_(factor)

"""Divergences between the target's next-token distribution p and the draft's q: one function each, one value per position.

A divergence takes a `Pair` (both sides as log-probabilities over the same buckets) and returns `[...]` values. Pairs come from
`dense_pair` (logits on both sides) or `sparse_pair` (the target's top-k log-probabilities and its tail mass), made a chunk of
rows at a time by `distill.loss.target_logits`. To add a divergence, add a function and its name in `DIVERGENCES`; autograd
differentiates it unless `distill.loss.gradients` has its gradient in closed form.
V target vocabulary, W draft vocabulary, K kept tokens, C buckets (V, W or K + 1); `...` any leading dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from configs.runtime.errors import InputError
from configs.schema.learning import LossConfig

# Stands for log 0. Finite, so that 0 * log 0 is 0 and a gradient is never NaN; far below what logits of +-1e4 can reach.
LOG_ZERO = -1e5


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Target and draft at the same positions, over the same buckets, in float32 (or float64 where that came in).

    log_p: `[..., C]`, without gradient. Sums to less than 1 where the draft's vocabulary leaves tokens of the target out.
    log_q: `[..., C]`, sums to 1.
    log_reach: `[...]`, the logarithm of that sum of p; None where it is 1.
    label_log_q: `[...]`, log q of the label at temperature 1, and 0 where there is no label; None without labels.
    temperature: what both sides' logits were divided by.
    """

    log_p: Tensor
    log_q: Tensor
    log_reach: Tensor | None = None
    label_log_q: Tensor | None = None
    temperature: float = 1.0

    @cached_property
    def p(self) -> Tensor:
        """The target's probabilities `[..., C]`."""
        return self.log_p.exp()

    @cached_property
    def q(self) -> Tensor:
        """The draft's probabilities `[..., C]`."""
        return self.log_q.exp()

    @cached_property
    def log_p_within(self) -> Tensor:
        """The target's log-probabilities `[..., C]`, given that the token is one the draft can propose."""
        return self.log_p if self.log_reach is None else self.log_p - self.log_reach.unsqueeze(-1)

    @cached_property
    def p_within(self) -> Tensor:
        """The target's probabilities `[..., C]`, given that the token is one the draft can propose."""
        return self.p if self.log_reach is None else self.log_p_within.exp()


@dataclass(frozen=True, kw_only=True)
class SparseTarget:
    """The target's K most likely tokens at each position, and the mass of all others.

    log_probs: `[..., K]`, any float type; token_ids: `[..., K]`, int64, distinct; log_tail: `[...]`, log of the remaining mass.
    temperature: what the target's logits were divided by when this was recorded. It cannot be changed afterwards.
    """

    log_probs: Tensor
    token_ids: Tensor
    log_tail: Tensor
    temperature: float = 1.0


Divergence = Callable[[Pair], Tensor]


def dense_pair(
    target_logits: Tensor,
    draft_logits: Tensor,
    *,
    temperature: float = 1.0,
    draft_token_ids_W: Tensor | None = None,
    labels: Tensor | None = None,
) -> Pair:
    """Pair full rows of logits.

    Args:
        target_logits: `[..., V]`, any float type. No gradient flows into it.
        draft_logits: `[..., V]`, or `[..., W]` with `draft_token_ids_W`.
        temperature: positive; divides the logits of both sides.
        draft_token_ids_W: int64, the target's id of each of the draft's tokens (d2t). With `arange(W)` it drops padded rows.
        labels: `[...]`, int64, **draft** ids of the next token, negative for none. Only `cross_entropy` reads them.

    Raises:
        ValueError: the temperature is not positive, or the two sides have no common vocabulary.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    num_shared = target_logits.shape[-1] if draft_token_ids_W is None else len(draft_token_ids_W)
    if draft_logits.shape[-1] != num_shared:
        raise ValueError(f"the draft has {draft_logits.shape[-1]} logits a position where {num_shared} are expected")
    target = _scaled(target_logits.detach(), temperature)
    draft = _scaled(draft_logits, temperature)
    log_reach = None
    log_p = target.log_softmax(-1)
    if draft_token_ids_W is not None:
        log_p = log_p.index_select(-1, draft_token_ids_W)
        log_reach = log_p.logsumexp(-1).clamp(min=LOG_ZERO)
    return Pair(
        log_p=log_p.clamp_(min=LOG_ZERO),
        log_q=draft.log_softmax(-1).clamp(min=LOG_ZERO),
        log_reach=log_reach,
        label_log_q=None if labels is None else _label_log_q(draft_logits, labels),
        temperature=temperature,
    )


def sparse_pair(target: SparseTarget, draft_logits: Tensor, *, labels: Tensor | None = None) -> Pair:
    """Pair a sparse target with full rows of draft logits `[..., V]`, at the temperature the target was recorded at.

    The tail is one more bucket, for both sides: C is K + 1. Merging tokens never adds to a divergence, so KL, JSD and total
    variation are lower bounds of the dense ones, and `acceptance` as an upper bound.
    """
    log_q = _scaled(draft_logits, target.temperature).log_softmax(-1).clamp(min=LOG_ZERO)
    log_q_tail = log_q.scatter(-1, target.token_ids, LOG_ZERO).logsumexp(-1, keepdim=True)
    log_p = torch.cat([target.log_probs, target.log_tail.unsqueeze(-1)], dim=-1).detach()
    return Pair(
        # Stored in half precision the masses no longer add up to 1, and a KL of equal sides would not be 0.
        log_p=log_p.to(log_q.dtype).log_softmax(-1).clamp_(min=LOG_ZERO),
        log_q=torch.cat([log_q.gather(-1, target.token_ids), log_q_tail], dim=-1),
        label_log_q=None if labels is None else _label_log_q(draft_logits, labels),
        temperature=target.temperature,
    )


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

    Raises:
        ValueError: beta is outside 0..1.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must lie in 0..1, got {beta}")
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


def kl_tv_blend(pair: Pair, *, eta: float = 3.0, mean_acceptance: float | Tensor | None = None) -> Tensor:
    """Return `[...]` w T^2 KL(p || q) + (1 - w) TV(p, q) with w = exp(-eta alpha), LK-lambda: KL at first, TV later.

    Args:
        eta: at least 0; how fast the weight moves away from KL. 0 is pure KL.
        mean_acceptance: alpha measured over many positions (a scalar, say the last step's mean over all ranks).
            None: every position is weighed by its own, detached acceptance.
    """
    weight = blend_weight(pair, eta, mean_acceptance)
    return weight * forward_kl(pair) + (1 - weight) * total_variation(pair)


def blend_weight(pair: Pair, eta: float, mean_acceptance: float | Tensor | None) -> Tensor:
    """Return the KL's weight in `kl_tv_blend`, whose arguments these are: `[...]`, or a scalar; without gradient."""
    alpha = acceptance(pair).detach() if mean_acceptance is None else mean_acceptance
    return torch.exp(-eta * torch.as_tensor(alpha, dtype=pair.log_q.dtype, device=pair.log_q.device))


# --- labels and mixes ------------------------------------------------------------------------------------------------


def cross_entropy(pair: Pair) -> Tensor:
    """Return `[...]` -log q(label) at temperature 1, in nats, and 0 where there is no label. Its gradient is q - onehot.

    Raises:
        ValueError: the pair was made without labels.
    """
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
        """Return `[...]` the sum."""
        return torch.stack([weight * divergence(pair) for divergence, weight in self.parts]).sum(0)


def mix(weights: Mapping[str, float], settings: Mapping[str, Mapping[str, float]] | None = None) -> Mix:
    """Return the weighted sum of named divergences, as one divergence. Weights are used as given, not normalised.

    Args:
        weights: name in `DIVERGENCES` -> finite weight, at least 0.
        settings: name -> keyword arguments of that divergence, e.g. `{"jsd": {"beta": 0.1}}`.

    Raises:
        InputError: a name is unknown, a weight is negative or not finite, settings name a divergence not in the mix, or
            nothing has any weight.
    """
    settings = settings or {}
    for name in [*weights, *settings]:
        if name not in DIVERGENCES:
            raise InputError(f"loss mix: unknown divergence {name!r}; known are {', '.join(DIVERGENCES)}")
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise InputError(f"loss mix: the weight of {name} must be a finite number of at least 0, got {weight}")
    if unused := set(settings) - set(weights):
        raise InputError(f"loss mix: settings for {min(unused)}, which the mix does not hold")
    parts = [(partial(DIVERGENCES[name], **settings.get(name, {})), weight) for name, weight in weights.items() if weight > 0]
    if not parts:
        raise InputError(f"loss mix: at least one weight must be above 0, got {dict(weights)}")
    return Mix(tuple(parts))


def configured_divergence(config: LossConfig) -> Divergence:
    """Return the divergence, or the weighted mix of them, that a config names."""
    weights = config.weights
    return mix(weights, {name: each for name, each in config.settings.model_dump().items() if name in weights})


def _kl(a: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    return (a * (log_a - log_b)).sum(-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = at_least_float32(logits)
    return wide if temperature == 1 else wide / temperature


def at_least_float32(values: Tensor) -> Tensor:
    """Return values in float32, or as they are in float64: what a divergence is computed in."""
    return values if values.dtype == torch.float64 else values.float()


def _label_log_q(draft_logits: Tensor, labels: Tensor) -> Tensor:
    logits = at_least_float32(draft_logits)
    log_q = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    return torch.where(labels >= 0, log_q.clamp(min=LOG_ZERO), 0)

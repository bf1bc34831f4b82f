"""The distribution a token is drawn from: one function for plain decoding, for the target's rows and for the draft's.

Lossless verification needs the same processing on all three and the exact distribution on the draft's side, so no other code
turns logits into probabilities for sampling. Order: temperature, top-k, top-p.
V vocabulary; `...` any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from configs.schema.decoding import SamplingConfig
from heads.device import keeps_small_tensors_near, widest_float

NUCLEUS_CANDIDATES = 1024
BLOCK = 128  # logits whose largest is found first


def token_probabilities(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return the probabilities `[..., V]` (float32) of logits `[..., V]` under `sampling`.

    Temperature 0 gives the one-hot distribution of the first largest logit. Top-p keeps the smallest set of most probable
    tokens that reaches p, and at least one. Both keep every token that ties with the last one kept: 16-bit logits tie often,
    and the distribution must not depend on how a sort orders ties.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, greedy_token(logits).unsqueeze(-1), 1.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        smallest_kept = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    probs = logits.softmax(-1)
    if sampling.top_p is None or sampling.top_p == 1:
        return probs
    falling = _most_probable(probs, sampling.top_p)
    mass_before = falling.cumsum(-1) - falling
    smallest_kept = falling.masked_fill(mass_before >= sampling.top_p, 1.0).amin(-1, keepdim=True)
    probs = probs.masked_fill(probs < smallest_kept, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def greedy_token(logits: Tensor) -> Tensor:
    """Return the first largest logit's index `[...]` of `[..., V]`; that of a NaN where there is one."""
    if not keeps_small_tensors_near(logits.device) or logits.shape[-1] % BLOCK:
        return logits.max(-1).indices
    # `argmax` and `max` of a row take a CPU six and two times as long: only `amax` is vectorised there.
    blocks = logits.unflatten(-1, (-1, BLOCK))
    block = blocks.amax(-1).max(-1, keepdim=True).indices.unsqueeze(-1)
    within = blocks.gather(-2, block.expand(*block.shape[:-1], BLOCK)).squeeze(-2).max(-1).indices
    return block.squeeze(-1).squeeze(-1) * BLOCK + within


def values_at(values: Tensor, index: Tensor) -> Tensor:
    """Return the value `[...]` at an index `[...]` of each row of `values` `[..., V]`."""
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index a row from unnormalised `weights` `[..., V]` by inverse transform sampling with `uniform` `[...]`."""
    return draw_with_replacement(weights, uniform.unsqueeze(-1)).squeeze(-1)


def draw_with_replacement(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw C independent indices a row from unnormalised `weights` `[..., V]` with `uniform` `[..., C]`.

    Sums are float64 where the device has it, and a token of weight 0 is never drawn. A row that sums to 0 or NaN gives
    arbitrary indices in range: the caller has to know such rows.
    """
    cumulated = weights.to(widest_float(weights.device)).cumsum(-1)
    total = cumulated[..., -1:].contiguous()
    drawn = torch.searchsorted(cumulated, (uniform * total).contiguous(), right=True)
    # The product can round up to the total; the last token that has weight then stands for it.
    last_with_weight = torch.searchsorted(cumulated, total, right=False)
    return torch.minimum(drawn, last_with_weight).clamp(max=weights.shape[-1] - 1)


def draw_without_replacement(probs_BV: Tensor, uniform_BC: Tensor) -> Tensor:
    """Return up to C distinct draws `[B, C]` a row, in order: each from the weights without the tokens drawn before it.

    Where there are fewer than C tokens, the columns beyond hold arbitrary ids in range, which the rule skips.
    """
    left_BV = probs_BV
    drawn = []
    for uniform_B in uniform_BC.unbind(1):
        token_B = draw(left_BV, uniform_B)
        left_BV = left_BV.scatter(-1, token_B.unsqueeze(-1), 0.0)
        drawn.append(token_B)
    return torch.stack(drawn, 1)


# How siblings of a sampled tree are drawn, C for one position; the rules of `eval.decoder.rules` are lossless for these.
DRAWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "with_replacement": draw_with_replacement,
    "without_replacement": draw_without_replacement,
    "k_seq": draw_with_replacement,
}


def _most_probable(probs: Tensor, mass: float) -> Tensor:
    """Return probabilities in descending order, all of them or at least as many as sum to `mass`."""
    # On a CPU, sorting a vocabulary takes longer than a small model's forward. On a GPU it does not, and the test would wait.
    if probs.device.type == "cpu" and probs.shape[-1] > NUCLEUS_CANDIDATES:
        values = probs.topk(NUCLEUS_CANDIDATES, dim=-1).values
        if bool((values.sum(-1) >= mass).all()):
            return values
    return probs.sort(dim=-1, descending=True).values

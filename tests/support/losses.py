"""Losses for tests: random logits, linear heads, and every divergence as a textbook has it, for autograd to differentiate."""

import math

import torch
from torch.nn import functional

from distill.loss.fused import LogitHead
from distill.signals import SignalSource


def linear_head(weight_VD, bias_V=None):
    """Return the head `hidden @ weight.T + bias`."""
    parameters = (weight_VD,) if bias_V is None else (weight_VD, bias_V)
    return LogitHead(logits_of=lambda hidden_CD: functional.linear(hidden_CD, weight_VD, bias_V), parameters=parameters)


def random_logits(seed, columns=11):
    """Return seven rows of random logits in float64, always the same."""
    return 2 * torch.randn(7, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kl(log_a, log_b):
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def textbook(name, target, draft, *, temperature=1.0, token_ids_W=None, labels=None, beta=0.5, eta=3.0):
    """Return the values of a divergence at rows of logits; `labels` are ids of the draft's."""
    target, draft = (each if each.dtype == torch.float64 else each.float() for each in (target, draft))
    ids = slice(None) if token_ids_W is None else token_ids_W
    log_p, log_q = (target / temperature).log_softmax(-1)[..., ids], (draft / temperature).log_softmax(-1)
    within = log_p - log_p.logsumexp(-1, keepdim=True)
    overlap = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    if name == "jsd":
        log_m = torch.logaddexp(within + math.log(beta), log_q + math.log1p(-beta))
        return temperature**2 * (kl(within, log_m) / (1 - beta) + kl(log_q, log_m) / beta)
    if name == "cross_entropy":
        return functional.cross_entropy(draft, labels.clamp(min=-1), reduction="none", ignore_index=-1)
    forward = temperature**2 * kl(within, log_q)
    weight = (-eta * overlap).exp().detach()
    return {
        "forward_kl": forward,
        "reverse_kl": temperature**2 * kl(log_q, within),
        "total_variation": 1 - overlap,
        "negative_log_acceptance": -overlap.log(),
        "kl_tv_blend": weight * forward + (1 - weight) * (1 - overlap),
    }[name]


def target_hidden(target, batch):
    """Return the target's final hidden states `[B, T, E]` over a batch, computed here."""
    return SignalSource(target).read(batch).states.final_BTE

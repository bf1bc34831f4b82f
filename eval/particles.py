"""Sequential Monte Carlo in place of verification (SMC-SD, 2604.15672). LOSSY: the output approaches the target's law.

Several particles continue one prompt. Each drafts from q, the target scores what was drafted, and a particle's weight takes up
the ratio of the two; particles of little weight die by resampling, nothing is ever rolled back. Pure functions over laws; the
law of the particle chosen in the end tends to the target's as particles grow in number. A report on it must say so, and put
the task's quality beside the speed. Left out: the caches and the models, which are in `eval.particle_run`.

A cycle: draft G tokens a particle, `weigh` them, `draw_bonus`, `resample` the particles that are worn out; at the end `choose`.
Particles that have ended go on as ancestors, with nothing left to weigh.
B requests, N particles, G drafts, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.law import draw


def weigh(
    log_weights_BN: Tensor, p_BNGV: Tensor, q_BNGV: Tensor, tokens_BNG: Tensor, num_drafted_BN: Tensor, power: float = 1.0
) -> Tensor:
    """Return the log-weights after a draft: each token adds power log p - log q.

    Args:
        log_weights_BN: up to here, in nats; 0 at the start.
        p_BNGV: the target's laws, the one a draft is judged by at the draft's place.
        q_BNGV: the laws the drafts were drawn from.
        tokens_BNG: the drafts.
        num_drafted_BN: drafts that count for each particle.
        power: positive; the law aimed at gives a text the product of its p^power, up to a constant. 1 aims at the target's.
    """
    counts_BNG = torch.arange(tokens_BNG.shape[-1], device=tokens_BNG.device) < num_drafted_BN.unsqueeze(-1)
    log_p_BNG, log_q_BNG = (_of_tokens(law_BNGV, tokens_BNG).double().log() for law_BNGV in (p_BNGV, q_BNGV))
    return log_weights_BN + (power * log_p_BNG - log_q_BNG).masked_fill(~counts_BNG, 0.0).sum(-1)


def draw_bonus(
    log_weights_BN: Tensor, p_BNV: Tensor, uniform_BN: Tensor, ended_BN: Tensor, power: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return a token `[B, N]` from the target's own law after each particle's drafts, and the log-weights with it.

    It comes from p^power renormalised, whose normaliser sum_v p^power goes into the weight; that is 1 at power 1.

    Args:
        log_weights_BN, power: as for `weigh`.
        p_BNV: the target's law after the drafts.
        uniform_BN: independent uniforms in [0, 1).
        ended_BN: particles that draw nothing; their token means nothing.
    """
    raised_BNV = p_BNV.double() ** power
    gain_BN = raised_BNV.sum(-1).log() if power != 1 else torch.zeros_like(log_weights_BN)
    return draw(raised_BNV, uniform_BN), log_weights_BN + gain_BN.masked_fill(ended_BN, 0.0)


def weight_shares(log_weights_BN: Tensor) -> Tensor:
    """Return the weights as shares of 1, in float64. Particles that are all impossible under the target share alike."""
    none_B1 = torch.isneginf(log_weights_BN).all(-1, keepdim=True)
    return log_weights_BN.double().masked_fill(none_B1, 0.0).softmax(-1)


def effective_sample_size(log_weights_BN: Tensor) -> Tensor:
    """Return 1/sum of the squared shares `[B]`, from 1 (one particle has all the weight) to N (all weigh the same)."""
    return 1 / weight_shares(log_weights_BN).square().sum(-1)


def resample(log_weights_BN: Tensor, uniform_B: Tensor, below: float) -> tuple[Tensor, Tensor]:
    """Return which particle each place goes on from `[B, N]`, and the log-weights after it.

    Only requests whose effective sample size is under `below` times N resample, and start again from equal weights; in the
    others every particle goes on as itself.

    Args:
        log_weights_BN: before.
        uniform_B: a uniform in [0, 1) a request.
        below: in 0..1; 0 never resamples.
    """
    num_particles = log_weights_BN.shape[-1]
    worn_B1 = (effective_sample_size(log_weights_BN) < below * num_particles).unsqueeze(-1)
    # Where the target has ruled out every text, it would weigh none of them any more: they go on, and alike.
    worn_B1 = worn_B1 | torch.isneginf(log_weights_BN).all(-1, keepdim=True)
    itself_N = torch.arange(num_particles, device=log_weights_BN.device)
    ancestors_BN = torch.where(worn_B1, systematic_ancestors(log_weights_BN, uniform_B), itself_N)
    return ancestors_BN, log_weights_BN.masked_fill(worn_B1, 0.0)


def systematic_ancestors(log_weights_BN: Tensor, uniform_B: Tensor) -> Tensor:
    """Resample systematically: N equally spaced points with one random offset, read off the cumulated shares.

    Particle n goes into N w_n places on average, and always into that number rounded down or up.

    Args:
        log_weights_BN, uniform_B: as for `resample`.
    """
    num_particles = log_weights_BN.shape[-1]
    points_BN = (torch.arange(num_particles, device=uniform_B.device) + uniform_B.unsqueeze(-1).double()) / num_particles
    cumulated_BN = weight_shares(log_weights_BN).cumsum(-1)
    found_BN = torch.searchsorted(cumulated_BN, points_BN * cumulated_BN[:, -1:], right=True)
    # A point can round up to the total; the last particle that has weight then stands for it.
    last_B1 = torch.searchsorted(cumulated_BN, cumulated_BN[:, -1:].contiguous(), right=False)
    return torch.minimum(found_BN, last_B1)


def choose(log_weights_BN: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the particle that becomes the answer `[B]`, drawn by weight; the heaviest would be biased towards likely text.

    Args:
        log_weights_BN, uniform_B: as for `resample`.
    """
    return draw(weight_shares(log_weights_BN), uniform_B)


def _of_tokens(laws: Tensor, tokens: Tensor) -> Tensor:
    return laws.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

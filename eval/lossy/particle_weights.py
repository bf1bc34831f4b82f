"""The weights of particles and what follows from them (SMC-SD, 2604.15672): pure functions of distributions.

In a cycle of `eval.lossy.particles`: `weigh` what was drafted, `draw_bonus`, `resample` where few particles carry the weight;
at the end `choose`. Particles that have ended have nothing left to weigh.
R requests, N particles, G drafts, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.device import widest_float
from heads.sampling.probabilities import draw, values_at


def weigh(
    log_weights_RN: Tensor, p_RNGV: Tensor, q_RNGV: Tensor, tokens_RNG: Tensor, num_drafted_RN: Tensor, power: float = 1.0
) -> Tensor:
    """Return the log-weights after a draft: each token adds power log p - log q.

    Args:
        log_weights_RN: up to here, in nats; 0 at the start.
        p_RNGV: the target's distribution at the place of each draft.
        q_RNGV: the distributions the drafts were drawn from.
        tokens_RNG: the drafts.
        num_drafted_RN: drafts that count for each particle.
        power: positive; the distribution aimed at gives a text the product of its p^power, up to a constant. 1 aims at the
            target's.
    """
    counts_RNG = torch.arange(tokens_RNG.shape[-1], device=tokens_RNG.device) < num_drafted_RN.unsqueeze(-1)
    log_p_RNG, log_q_RNG = (
        values_at(probs_RNGV, tokens_RNG).to(widest_float(p_RNGV.device)).log() for probs_RNGV in (p_RNGV, q_RNGV)
    )
    return log_weights_RN + (power * log_p_RNG - log_q_RNG).masked_fill(~counts_RNG, 0.0).sum(-1)


def draw_bonus(
    log_weights_RN: Tensor, p_RNV: Tensor, uniform_RN: Tensor, ended_RN: Tensor, power: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return a token `[R, N]` from the target's own distribution after each particle's drafts, and the log-weights with it.

    It comes from p^power renormalised, whose normaliser sum_v p^power goes into the weight; that is 1 at power 1. Particles in
    `ended_RN` draw nothing; their token means nothing.
    """
    raised_RNV = p_RNV.to(widest_float(p_RNV.device)) ** power
    gain_RN = raised_RNV.sum(-1).log() if power != 1 else torch.zeros_like(log_weights_RN)
    return draw(raised_RNV, uniform_RN), log_weights_RN + gain_RN.masked_fill(ended_RN, 0.0)


def weight_shares(log_weights_RN: Tensor) -> Tensor:
    """Return the weights as shares of 1, as wide as the device has them; equal ones where all particles are impossible."""
    none_R1 = torch.isneginf(log_weights_RN).all(-1, keepdim=True)
    return log_weights_RN.to(widest_float(log_weights_RN.device)).masked_fill(none_R1, 0.0).softmax(-1)


def effective_sample_size(log_weights_RN: Tensor) -> Tensor:
    """Return 1/sum of the squared shares `[R]`, from 1 (one particle has all the weight) to N (all weigh the same)."""
    return 1 / weight_shares(log_weights_RN).square().sum(-1)


def resample(log_weights_RN: Tensor, uniform_R: Tensor, below: float) -> tuple[Tensor, Tensor]:
    """Return which particle each place goes on from `[R, N]`, and the log-weights after it.

    Only requests whose effective sample size is under `below` times N resample, and start again from equal weights; in the
    others every particle goes on as itself.
    """
    num_particles = log_weights_RN.shape[-1]
    worn_R1 = (effective_sample_size(log_weights_RN) < below * num_particles).unsqueeze(-1)
    # Where every text is impossible under the target, all go on with equal weights.
    worn_R1 = worn_R1 | torch.isneginf(log_weights_RN).all(-1, keepdim=True)
    itself_N = torch.arange(num_particles, device=log_weights_RN.device)
    ancestors_RN = torch.where(worn_R1, systematic_ancestors(log_weights_RN, uniform_R), itself_N)
    return ancestors_RN, log_weights_RN.masked_fill(worn_R1, 0.0)


def systematic_ancestors(log_weights_RN: Tensor, uniform_R: Tensor) -> Tensor:
    """Resample systematically: N equally spaced points with one random offset, read off the cumulated shares.

    Particle n goes into N w_n places on average, and always into that number rounded down or up.
    """
    num_particles = log_weights_RN.shape[-1]
    points_RN = (
        torch.arange(num_particles, device=uniform_R.device) + uniform_R.unsqueeze(-1).to(widest_float(uniform_R.device))
    ) / num_particles
    cumulated_RN = weight_shares(log_weights_RN).cumsum(-1)
    found_RN = torch.searchsorted(cumulated_RN, points_RN * cumulated_RN[:, -1:], right=True)
    # A point can round up to the total; the last particle that has weight then stands for it.
    last_R1 = torch.searchsorted(cumulated_RN, cumulated_RN[:, -1:].contiguous(), right=False)
    return torch.minimum(found_RN, last_R1)


def choose(log_weights_RN: Tensor, uniform_R: Tensor) -> Tensor:
    """Return the particle that becomes the answer `[R]`, drawn by weight; the heaviest would be biased towards likely text."""
    return draw(weight_shares(log_weights_RN), uniform_R)

"""The distillation benchmark's loss part: our chunked loss, the plain one through autograd, and TRL's chunked one.

All compute the mean divergence of the same random hidden states through frozen bfloat16 heads, and its gradient with respect to
the draft's hidden states. N positions, D width, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from distill.loss.divergences import jsd
from distill.loss.fused import DraftRows, TargetRows, fused_loss
from distill.loss.logit_head import LogitHead
from eval.stats.bootstrap import Interval, paired_ratio_interval
from scripts.lab.bench.harness import in_fresh_process, measure_growth, read_kibibytes
from scripts.lab.bench.peers.trl_gkd import trl_is_installed
from scripts.lab.bench.turns import take_turns
from scripts.lab.measuring import SEED
from scripts.lab.settings import BenchLossConfig

OURS, UNCHUNKED, TRL = "chunked", "unchunked", "trl_chunked"
BETAS = {"jsd": 0.5, "forward_kl": 0.0, "reverse_kl": 1.0}  # the generalised JSD by its ends, as TRL takes it, too

# Tensors of [N, V] float32 that the unchunked loss holds at its peak: measured as a little over eight, rounded up. For
# choosing N, never for a result.
TENSORS_AT_PEAK = 9
BYTES_AT_PEAK = 4 * TENSORS_AT_PEAK
MOST_BYTES = 24 * 2**30  # that the unchunked loss may take; 4096 positions take 21 GiB
# Largest relative difference of two sides' values: TRL does not round logits to bfloat16, the others do.
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Hidden states and heads, bfloat16; only the draft's hidden states want a gradient."""

    draft_hidden_ND: Tensor
    target_hidden_ND: Tensor
    draft_head_VD: Tensor
    target_head_VD: Tensor


LossSide = Callable[[LossInputs], Tensor]


class Key(NamedTuple):
    divergence: str
    side: str


class Pass(NamedTuple):
    """One forward and backward: growth of the resident set over the loaded inputs, wall-clock seconds, the loss."""

    peak_mebibytes: float
    seconds: float
    value: float


@dataclass(frozen=True, kw_only=True)
class LossMeasurement:
    config: BenchLossConfig
    positions: int
    passes: Mapping[Key, Sequence[Pass]]

    @property
    def values(self) -> dict[str, dict[str, float]]:
        values: dict[str, dict[str, float]] = {}
        for key, passes in self.passes.items():
            values.setdefault(key.divergence, {})[key.side] = passes[0].value
        return values

    @property
    def agrees(self) -> bool:
        return all(
            math.isclose(value, by_side[OURS], rel_tol=TOLERANCE)
            for by_side in self.values.values()
            for value in by_side.values()
        )

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "loss": key.side,
                "divergence": key.divergence,
                "vocabulary": self.config.vocab_size,
                "positions": self.positions,
                "peak_mebibytes": fmean(each.peak_mebibytes for each in passes),
                "seconds": fmean(each.seconds for each in passes),
            }
            for key, passes in self.passes.items()
        ]

    def ratios(self, samples: int) -> dict[str, Interval]:
        """Return our memory and time over each other side's, paired by repeat: below 1 we take less."""
        ratios = {}
        for (divergence, side), theirs in self.passes.items():
            if side == OURS:
                continue
            ours, prefix = self.passes[Key(divergence, OURS)], "" if divergence == "jsd" else f"{divergence}_"
            for what, field in (("peak_memory", "peak_mebibytes"), ("time", "seconds")):
                taken = [[getattr(each, field) for each in passes] for passes in (ours, theirs)]
                ones = [1.0] * len(ours)
                interval = paired_ratio_interval(taken[0], ones, taken[1], ones, samples=samples, seed=SEED)
                ratios[f"{prefix}loss_{what}_vs_{side}"] = interval
        return ratios


def measure_losses(config: BenchLossConfig) -> LossMeasurement:
    positions = fitting_positions(config)
    keys = {"/".join(key): key for key in loss_sides(config.chunk_size)}

    def side(key: Key, number: int, repeat: int) -> Pass:
        return in_fresh_process(measure_pass, config, key, positions)

    sides = {name: partial(side, key) for name, key in keys.items()}
    name = "memory and time of the loss"
    turns = take_turns(sides, range(config.repeats), 1, description=name, unit="repeats", warm_up=False)
    passes = {key: [turn.result for (turn,) in turns[name]] for name, key in keys.items()}
    return LossMeasurement(config=config, positions=positions, passes=passes)


# --- the sides ----------------------------------------------------------------------------------------------------


def loss_sides(chunk_size: int) -> dict[Key, LossSide]:
    """Return the sides; TRL's, and ours that have only those beside them, where that is installed."""
    ours = {Key(name, OURS): partial(chunked_divergence, beta=beta, chunk_size=chunk_size) for name, beta in BETAS.items()}
    plain: dict[Key, LossSide] = {Key("jsd", OURS): ours[Key("jsd", OURS)], Key("jsd", UNCHUNKED): unchunked_jsd}
    if not trl_is_installed():
        return plain
    return plain | ours | {Key(name, TRL): partial(trl_divergence, beta=beta) for name, beta in BETAS.items()}


def chunked_divergence(inputs: LossInputs, *, beta: float, chunk_size: int) -> Tensor:
    """Return the loss by `distill.loss.fused`, divided between the ends by what our JSD is larger by.

    It is not compiled: that would count as memory and time of the one pass that a process makes.
    """
    num_positions = len(inputs.draft_hidden_ND)
    weight_VD = inputs.draft_head_VD
    target = TargetRows(hidden_PE=inputs.target_hidden_ND, logits_of=partial(F.linear, weight=inputs.target_head_VD))
    rows = DraftRows(
        hidden_ND=inputs.draft_hidden_ND,
        head=LogitHead(logits_of=partial(F.linear, weight=weight_VD), parameters=(weight_VD,)),
        weights_N=torch.full((num_positions,), 1 / num_positions),
        places_N=torch.arange(num_positions),
    )
    loss, _ = fused_loss(target, [rows], partial(jsd, beta=beta), chunk_size=chunk_size, compiled=False)
    return loss * (beta * (1 - beta) or 1)


def unchunked_jsd(inputs: LossInputs) -> Tensor:
    """Return the loss as it stands in a textbook, all positions at once, with autograd doing the rest."""
    with torch.no_grad():
        log_p_NV = F.linear(inputs.target_hidden_ND, inputs.target_head_VD).float().log_softmax(-1)
        p_NV = log_p_NV.exp()
    log_q_NV = F.linear(inputs.draft_hidden_ND, inputs.draft_head_VD).float().log_softmax(-1)
    log_m_NV = torch.logaddexp(log_p_NV, log_q_NV) - math.log(2)
    target_side_N = (p_NV * (log_p_NV - log_m_NV)).sum(-1)
    draft_side_N = (log_q_NV.exp() * (log_q_NV - log_m_NV)).sum(-1)
    return (target_side_N + draft_side_N).mean() / 2


def trl_divergence(inputs: LossInputs, *, beta: float) -> Tensor:
    """Return the mean generalised JSD over positions as TRL's `DistillationTrainer` computes it, in tiles."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    length = len(inputs.draft_hidden_ND)
    hidden = inputs.draft_hidden_ND.unsqueeze(0), inputs.target_hidden_ND.unsqueeze(0)
    mask_1N = torch.ones(1, length, dtype=torch.long)
    loss, _, _ = _chunked_divergence_loss(*hidden, inputs.draft_head_VD, inputs.target_head_VD, mask_1N, beta, length)
    return loss


def make_inputs(num_positions: int, width: int, vocab_size: int, *, seed: int = 0) -> LossInputs:
    """Return random hidden states and heads, with logits of a standard deviation of 3, about as a language model's."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16)

    scale = 3 / math.sqrt(width)
    return LossInputs(
        draft_hidden_ND=draw(num_positions, width).requires_grad_(),
        target_hidden_ND=draw(num_positions, width),
        draft_head_VD=draw(vocab_size, width).mul_(scale),
        target_head_VD=draw(vocab_size, width).mul_(scale),
    )


def forward_backward(side: LossSide, inputs: LossInputs) -> float:
    inputs.draft_hidden_ND.grad = None
    loss = side(inputs)
    loss.backward()
    return loss.item()


# --- one pass -----------------------------------------------------------------------------------------------------


def fitting_positions(config: BenchLossConfig) -> int:
    limit = min(MOST_BYTES, read_kibibytes("/proc/meminfo", "MemAvailable") * 1024)
    positions = config.positions
    while positions * config.vocab_size * BYTES_AT_PEAK > limit:
        positions //= 2
    return positions


def measure_pass(config: BenchLossConfig, key: Key, num_positions: int) -> Pass:
    """Return what one pass takes; once a process, as memory left with the allocator would be used again unseen."""
    side = loss_sides(config.chunk_size)[key]
    forward_backward(side, make_inputs(2, config.width, 16))  # what libraries take at their first use is not the loss's
    inputs = make_inputs(num_positions, config.width, config.vocab_size)

    def timed() -> tuple[float, float]:
        started = time.perf_counter()
        value = forward_backward(side, inputs)
        return value, time.perf_counter() - started

    (value, seconds), growth = measure_growth(timed)
    return Pass(growth / 2**20, seconds, value)

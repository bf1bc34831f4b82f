"""The distillation benchmark's loss part: our chunked loss, the plain one through autograd, and TRL's chunked one.

All three compute the mean Jensen-Shannon divergence (beta 1/2, textbook size) of the same random hidden states through frozen
bfloat16 heads, with float32 logits in the divergence, and its gradient with respect to the draft's hidden states. Ours also
finds acceptance and top-1 agreement on the way, as it does in training. On the CPU: peaks are those of the resident set.

N positions, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.errors import InputError
from configs.progress import track
from configs.schema import BenchLossConfig
from distill.chunked import chunked_loss, linear_head
from distill.losses import jsd
from eval.intervals import Interval, paired_ratio_interval
from scripts.benchmarks import take_turns, with_bounds
from scripts.trl_peer import trl_chunked_jsd, trl_is_installed

OURS, UNCHUNKED, TRL = "chunked", "unchunked", "trl_chunked"

# Tensors of [N, V] float32 that the unchunked loss holds at its peak: measured as a little over eight, rounded up. For
# choosing N, never for a result.
TENSORS_AT_PEAK = 9
BYTES_AT_PEAK = 4 * TENSORS_AT_PEAK
GIBIBYTE = 2**30
# Largest relative difference of two sides' values: all round logits to bfloat16, in matrix products of other shapes.
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Hidden states and heads, bfloat16; only the draft's hidden states want a gradient."""

    draft_hidden_ND: Tensor
    target_hidden_ND: Tensor
    draft_head_VD: Tensor
    target_head_VD: Tensor


LossSide = Callable[[LossInputs], Tensor]


@dataclass(frozen=True, kw_only=True)
class LossMeasurement:
    """What every side took, repeat by repeat, by the side's name.

    positions: of the memory and of the time measurement.
    peak_mebibytes: growth of the resident set over the loaded inputs, each in a process of its own.
    seconds: of a forward and backward.
    values: the loss itself.
    """

    config: BenchLossConfig
    memory_positions: int
    time_positions: int
    peak_mebibytes: Mapping[str, Sequence[float]]
    seconds: Mapping[str, Sequence[float]]
    values: Mapping[str, float]

    @property
    def agrees(self) -> bool:
        """Whether all sides computed the same loss."""
        return all(math.isclose(value, self.values[UNCHUNKED], rel_tol=TOLERANCE) for value in self.values.values())

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for every side."""
        return [
            {
                "loss": name,
                "vocabulary": self.config.vocab_size,
                "memory_positions": self.memory_positions,
                "peak_mebibytes": _mean(self.peak_mebibytes[name]),
                "time_positions": self.time_positions,
                "seconds": _mean(self.seconds[name]),
            }
            for name in self.seconds
        ]

    def ratios(self, samples: int) -> dict[str, float | None]:
        """Return our memory and time over each other side's, with bounds; below 1 we take less."""
        ratios: dict[str, float | None] = {}
        for other in (name for name in self.seconds if name != OURS):
            memory = _ratio(self.peak_mebibytes[OURS], self.peak_mebibytes[other], samples)
            seconds = _ratio(self.seconds[OURS], self.seconds[other], samples)
            ratios |= with_bounds(f"loss_peak_memory_vs_{other}", memory) | with_bounds(f"loss_time_vs_{other}", seconds)
        return ratios


def measure_losses(config: BenchLossConfig) -> LossMeasurement:
    """Measure peak memory, then time, of every side in turns.

    Raises:
        InputError: the machine does not tell its memory the way Linux does, or has too little for a single position.
    """
    positions = fitting_positions(config, config.memory_positions)
    sides = loss_sides(config.chunk_size)
    peaks: dict[str, list[float]] = {name: [] for name in sides}
    for name in track(list(sides) * config.memory_repeats, description="peak memory of the loss", unit="processes"):
        peaks[name].append(in_fresh_process(config, name, positions))
    time_positions = fitting_positions(config, config.time_positions)
    inputs = make_inputs(time_positions, config.width, config.vocab_size)
    runs = {name: partial(_timed_side, side, inputs) for name, side in sides.items()}
    turns = take_turns(runs, range(config.time_repeats), 1, description="time of the loss", unit="repeats")
    return LossMeasurement(
        config=config,
        memory_positions=positions,
        time_positions=time_positions,
        peak_mebibytes=peaks,
        seconds={name: [turn.seconds for (turn,) in cases] for name, cases in turns.items()},
        values={name: cases[0][0].result for name, cases in turns.items()},
    )


# --- the sides ----------------------------------------------------------------------------------------------------


def loss_sides(chunk_size: int) -> dict[str, LossSide]:
    """Return the sides by name; TRL's only where that is installed."""
    sides: dict[str, LossSide] = {OURS: partial(chunked_jsd, chunk_size=chunk_size), UNCHUNKED: unchunked_jsd}
    if trl_is_installed():
        sides[TRL] = trl_jsd
    return sides


def chunked_jsd(inputs: LossInputs, *, chunk_size: int) -> Tensor:
    """Return the loss by `distill.chunked`, divided by the four that our JSD is larger by at beta 1/2."""
    num_positions = len(inputs.draft_hidden_ND)
    result = chunked_loss(
        inputs.draft_hidden_ND,
        linear_head(inputs.draft_head_VD),
        inputs.target_hidden_ND,
        linear_head(inputs.target_head_VD),
        partial(jsd, beta=0.5),
        torch.full((num_positions,), 1 / num_positions),
        chunk_size=chunk_size,
    )
    return result.loss / 4


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


def trl_jsd(inputs: LossInputs) -> Tensor:
    """Return the loss by TRL's tiles."""
    return trl_chunked_jsd(
        inputs.draft_hidden_ND, inputs.target_hidden_ND, inputs.draft_head_VD, inputs.target_head_VD, beta=0.5
    )


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
    """Compute a side's loss and leave its gradient on the draft's hidden states; return the loss."""
    inputs.draft_hidden_ND.grad = None
    loss = side(inputs)
    loss.backward()
    return loss.item()


def _timed_side(side: LossSide, inputs: LossInputs, case: int, repeat: int) -> float:
    return forward_backward(side, inputs)


# --- memory -------------------------------------------------------------------------------------------------------


def fitting_positions(config: BenchLossConfig, wanted: int) -> int:
    """Halve a number of positions until the unchunked loss fits into the memory allowed and available.

    Raises:
        InputError: not even one position does, or the memory is unknown.
    """
    limit = min(config.max_gibibytes * GIBIBYTE, _read_kibibytes("/proc/meminfo", "MemAvailable") * 1024)
    positions = wanted
    while positions * config.vocab_size * BYTES_AT_PEAK > limit:
        positions //= 2
    if positions == 0:
        needed = config.vocab_size * BYTES_AT_PEAK / GIBIBYTE
        raise InputError(
            f"loss.max_gibibytes: expected at least {needed:.3g} GiB, which one position of the unchunked loss takes, got "
            f"{limit / GIBIBYTE:.3g} (the smaller of the setting and the memory that is free)"
        )
    return positions


def peak_growth(config: BenchLossConfig, name: str, num_positions: int) -> float:
    """Return by how many MiB this process's resident set grew at its peak, over the loaded inputs, in one pass of a side.

    To be called once, in a fresh process: memory that earlier work left with the allocator would be used again unseen.
    """
    side = loss_sides(config.chunk_size)[name]
    forward_backward(side, make_inputs(2, config.width, 16))  # what libraries take at their first use is not the loss's
    inputs = make_inputs(num_positions, config.width, config.vocab_size)
    # Not getrusage's ru_maxrss: that begins with the peak of the process this one was started from.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # begin the peak anew
    before = _read_kibibytes("/proc/self/status", "VmRSS")
    forward_backward(side, inputs)
    return (_read_kibibytes("/proc/self/status", "VmHWM") - before) / 1024


def in_fresh_process(config: BenchLossConfig, name: str, num_positions: int) -> float:
    """Return `peak_growth` as a new process measures it, which inherits neither memory nor a peak from this one."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(peak_growth, config, name, num_positions).result()


def _read_kibibytes(path: str, name: str) -> int:
    """Return a `Name:  123 kB` line of a file of the kernel's.

    Raises:
        InputError: there is no such file: the system is not Linux.
    """
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise InputError(f"this benchmark reads memory from {path}, which only Linux has: {error.strerror}") from error
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _ratio(ours: Sequence[float], other: Sequence[float], samples: int) -> Interval:
    """Return our sum over the other side's, paired by repeat."""
    ones = [1.0] * len(ours)
    return paired_ratio_interval(ours, ones, other, ones, samples=samples, seed=0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

"""EAGLE-3's unrolled attention beside one that holds the scores of all pairs at every depth, as it was before `read_ranges`.

A pass is forward and backward of one layer's attention over `DEPTHS` depths, in bfloat16 autocast and of SmolLM2's sizes. Each
side's passes run in a process of its own, by turns; it returns their time and by how much the first one's resident memory grew.
CPU and Linux only; 4096 positions take the dense side some 6 GiB.
B batch, T positions, K depths, N heads, M key-value heads, H head width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from eval.stats.bootstrap import Interval, paired_ratio_interval
from heads.families.eagle3 import UnrolledKeys
from heads.modules.attention import Ranges, causal_ranges
from heads.modules.layers import DraftAttention, LayerShape, Rotary, Rotation
from scripts.lab.bench.harness import in_fresh_process, measure_growth
from scripts.trials.turns import SEED, take_turns

OURS, DENSE = "ranges", "dense"
SHAPE = LayerShape(
    width=576,
    mlp_width=1536,
    num_heads=9,
    num_key_value_heads=3,
    head_width=64,
    norm_epsilon=1e-5,
    rope_theta=1e4,
    max_positions=8192,
)
DEPTHS, REPEATS = 4, 3
BATCH = 2048  # positions of a pass at least, in rows of the length asked for
TOLERANCE = 1e-2  # relative, of the sums of squares that the sides go backward from: bfloat16's rounding


class DenseKeys(UnrolledKeys):
    """`UnrolledKeys` with a mask and scores `[B, N, T, T]`."""

    def __init__(self, ranges: Ranges, *earlier: tuple[Tensor, Tensor]) -> None:
        super().__init__(ranges, *earlier)
        places_T = torch.arange(ranges.first_BX.shape[1])
        visible_BTT = (places_T >= ranges.first_BX.unsqueeze(-1)) & (places_T < ranges.end_BX.unsqueeze(-1))
        self.visible_B1TT = visible_BTT.unsqueeze(1)

    def next(self, ranges: Ranges) -> DenseKeys:
        return DenseKeys(ranges, *self.earlier, self._own)

    def attend(self, attention: DraftAttention, states_BTX: Tensor, rotation: Rotation) -> Tensor:
        self._own = attention.keys_values(states_BTX, rotation)
        q_BNTH = attention.queries(states_BTX, rotation)
        if not self.earlier:
            mask = self.visible_B1TT
            return attention.output(scaled_dot_product_attention(q_BNTH, *self._own, attn_mask=mask, enable_gqa=True))
        groups, scale = q_BNTH.shape[1] // self._own[0].shape[1], q_BNTH.shape[-1] ** -0.5
        pairs = zip(*(*self.earlier, self._own), strict=True)
        keys, values = ([each.repeat_interleave(groups, 1) for each in of_depths] for of_depths in pairs)
        block_BNTT = (q_BNTH @ keys[0].transpose(2, 3)).float() * scale
        block_BNTT = block_BNTT.masked_fill(~self.visible_B1TT, -math.inf)
        diagonals_BNTK = torch.stack([(q_BNTH * own).sum(-1).float() * scale for own in keys[1:]], -1)
        weights = torch.cat([block_BNTT, diagonals_BNTK], -1).softmax(-1).to(values[0].dtype)
        T = block_BNTT.shape[-1]
        mixed_BNTH = weights[..., :T] @ values[0]
        for place, own in enumerate(values[1:]):
            mixed_BNTH = mixed_BNTH + weights[..., T + place, None] * own
        return attention.output(mixed_BNTH)


class Pass(NamedTuple):
    """Growth of the resident memory in a process's first pass, mean wall-clock seconds of those after it, and the result."""

    peak_mebibytes: float
    seconds: float
    value: float


Passes = Mapping[int, Mapping[str, Sequence[Pass]]]  # by positions of a row, and side


def compare_attention(lengths: Sequence[int]) -> Passes:
    """Measure both sides at each length.

    Raises:
        RuntimeError: they do not compute the same.
    """
    passes = {}
    for length in lengths:
        sides = {side: partial(_in_process, side, length) for side in (OURS, DENSE)}
        name = f"attention over {length} positions"
        turns = take_turns(sides, range(REPEATS), 1, description=name, unit="repeats", warm_up=False)
        passes[length] = {side: [turn.result for (turn,) in turns[side]] for side in sides}
        ours, dense = (passes[length][side][0].value for side in (OURS, DENSE))
        if not math.isclose(ours, dense, rel_tol=TOLERANCE):
            raise RuntimeError(f"attention over {length} positions gives {ours:.6g}, and dense {dense:.6g}")
    return passes


def attention_rows(passes: Passes) -> list[dict[str, Any]]:
    """Return a row for each length and side."""
    return [
        {
            "attention": f"eagle3, {side}",
            "positions": length,
            "rows": _batch(length),
            "peak_mebibytes": fmean(each.peak_mebibytes for each in own),
            "seconds": fmean(each.seconds for each in own),
        }
        for length, by_side in passes.items()
        for side, own in by_side.items()
    ]


def attention_ratios(passes: Passes, samples: int) -> dict[str, Interval]:
    """Return our memory and time over the dense side's, paired by repeat: below 1 we take less. The longest rows name none."""
    ratios = {}
    for length, by_side in passes.items():
        place = "" if length == max(passes) else f"_at_{length}"
        for what, field in (("memory", "peak_mebibytes"), ("time", "seconds")):
            ours, dense = ([getattr(each, field) for each in by_side[side]] for side in (OURS, DENSE))
            ones = [1.0] * len(ours)
            interval = paired_ratio_interval(ours, ones, dense, ones, samples=samples, seed=SEED)
            ratios[f"eagle3_attention_{what}_vs_dense{place}"] = interval
    return ratios


def measure_pass(side: str, length: int) -> Pass:
    """Return what a side takes; to be called once in a process, whose allocator would use memory again unseen."""
    torch.manual_seed(0)
    attention, rotary = DraftAttention(SHAPE, SHAPE.width), Rotary(SHAPE)
    run = partial(_forward_backward, attention, rotary, {OURS: UnrolledKeys, DENSE: DenseKeys}[side])
    run(torch.zeros(DEPTHS, 1, 2, SHAPE.width))  # what libraries take at their first use is not attention's
    states_KBTD = torch.randn(DEPTHS, _batch(length), length, SHAPE.width)
    value, growth = measure_growth(partial(run, states_KBTD))
    num_timed = max(1, 2048 // length)
    started = time.perf_counter()
    for _ in range(num_timed):
        run(states_KBTD)
    return Pass(growth / 2**20, (time.perf_counter() - started) / num_timed, value)


def _in_process(side: str, length: int, number: int, repeat: int) -> Pass:
    return in_fresh_process(measure_pass, side, length)


def _batch(length: int) -> int:
    return max(1, BATCH // length)


def _forward_backward(attention: DraftAttention, rotary: Rotary, make: type[UnrolledKeys], states_KBTD: Tensor) -> float:
    """Run attention at every depth over states that want a gradient; return the sum of its squares."""
    states_KBTD = states_KBTD.detach().requires_grad_()
    _, B, T, _ = states_KBTD.shape
    positions_BT = torch.arange(T).expand(B, T)
    ranges = causal_ranges(positions_BT)
    keys, outputs = make(ranges), []
    with torch.autocast("cpu", torch.bfloat16):
        for depth, states_BTD in enumerate(states_KBTD):
            outputs.append(keys.attend(attention, states_BTD, rotary(states_BTD, positions_BT + depth)))
            keys = keys.next(ranges)
    loss = torch.stack([each.float().square().sum() for each in outputs]).sum()
    loss.backward()
    return loss.item()

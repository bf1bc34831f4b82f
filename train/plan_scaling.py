"""What a step costs on n accelerators, on paper: the work of one, and what has to be sent between them.

Bytes that each accelerator sends in a step for a trained draft of D float32 numbers, with rings (Patarasuk and Yuan 2009;
Rajbhandari et al. 2020, arXiv 1910.02054, section 7):

    DDP, ZeRO-1, ZeRO-2      2 (n - 1) / n * 4 D    reduce-scatter of gradients, all-gather of gradients or of new weights
    ZeRO-3, FSDP2            3 (n - 1) / n * 4 D    all-gather of weights forward and backward, reduce-scatter of gradients
    target split as well     + (n - 1) / n * P      all-gather of the target's P bytes, once a micro-batch; none with a cache

Weak scaling: every accelerator keeps its own micro-batch, and the global batch grows with n. Efficiency is the time of one
accelerator's work over that of the step, once with nothing sent while anything is computed and once with all of it hidden
behind what is computed, as far as that is long enough; a real run lies between. On several nodes all traffic is reckoned at an
accelerator's share of the network, which is what the slowest link of a ring allows.

Left out on purpose: stragglers, failures, the input pipeline, hierarchical collectives. None of it was run: no such machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import PreTrainedModel

from configs.planning import HardwareConfig, PlanConfig
from train.plan_memory import WIDE, Memory
from train.plan_models import Models, count
from train.plan_work import Times, communication_seconds

SIZES = (8, 64, 1024)
DDP, SPLIT = "ddp, zero1, zero2", "fsdp2, zero3"
REPLICATED, SHARDED = "whole on each", "split"


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A step on n accelerators.

    sent_bytes: by each accelerator.
    efficiency_low, efficiency_high: with nothing overlapped, and with everything that can be.
    tokens_per_second_low, tokens_per_second_high: of all accelerators together, with the one and the other.
    """

    num_accelerators: int
    engine: str
    target: str
    sent_bytes: float
    communication_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    efficiency_low: float
    efficiency_high: float
    tokens_per_second_low: float
    tokens_per_second_high: float


def ring_bytes(num_bytes: float, num_accelerators: int, passes: int) -> float:
    """Return what each of n accelerators sends to pass a tensor of `num_bytes` round a ring so many times."""
    return passes * (num_accelerators - 1) / num_accelerators * num_bytes


def scale(
    config: PlanConfig, models: Models, memory: Memory, times: Times, *, tokens_per_step: float, sizes: tuple[int, ...] = SIZES
) -> list[Scaled]:
    """Return a row for each number of accelerators, engine and way of holding the target.

    Args:
        config: brings the machine; its own number of accelerators does not count here.
        models, memory, times: of one accelerator's work.
        tokens_per_step: of one accelerator.
        sizes: numbers of accelerators.
    """
    rows = []
    for n in sizes:
        hardware = config.hardware.model_copy(update={"num_accelerators": n})
        for engine, passes in ((DDP, 2), (SPLIT, 3)):
            for target in (REPLICATED, SHARDED):
                gathered = memory.target_weights if target == SHARDED and config.data.cache is None else 0
                accumulated = config.schedule.gradient_accumulation_steps
                sent = ring_bytes(WIDE * count(models.draft, trained=True), n, passes) + accumulated * ring_bytes(
                    gathered, n, 1
                )
                messages = _num_messages(models, n, passes, split_target=target == SHARDED)
                rows.append(_scaled(hardware, engine, target, sent, messages, times, tokens_per_step))
    return rows


def _scaled(
    hardware: HardwareConfig, engine: str, target: str, sent: float, messages: int, times: Times, tokens_per_step: float
) -> Scaled:
    alone, talking, n = times.total, communication_seconds(sent, hardware, messages), hardware.num_accelerators
    apart, hidden = alone + talking, max(alone, talking)
    return Scaled(
        num_accelerators=n,
        engine=engine,
        target=target,
        sent_bytes=sent,
        communication_seconds=talking,
        step_seconds_low=hidden,
        step_seconds_high=apart,
        efficiency_low=alone / apart,
        efficiency_high=alone / hidden,
        tokens_per_second_low=n * tokens_per_step / apart,
        tokens_per_second_high=n * tokens_per_step / hidden,
    )


def _num_messages(models: Models, n: int, passes: int, *, split_target: bool) -> int:
    """Return how many messages follow one another: trees of depth log2(n), once a pass, and once a block of a split target."""
    text = models.target.config.get_text_config()
    layers = models.draft.config.get_text_config().num_hidden_layers if isinstance(models.draft, PreTrainedModel) else 1
    collectives = passes * layers + (text.num_hidden_layers if split_target else 0)
    return math.ceil(math.log2(n)) * collectives if n > 1 else 0

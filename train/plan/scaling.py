"""The time of a step on n accelerators, estimated: the work of one, and the bytes sent between them.

Bytes that each accelerator sends in a step of A micro-batches for a trained draft of D float32 numbers, with rings (Patarasuk
and Yuan 2009; Rajbhandari et al. 2020, arXiv 1910.02054, section 7):

    DDP, ZeRO-1              2 (n - 1) / n * 4 D          reduce-scatter and all-gather of gradients or new weights, once a step
    ZeRO-2                   (A + 1) (n - 1) / n * 4 D    gradients are split after each micro-batch, weights gathered once
    ZeRO-3                   3 A (n - 1) / n * 4 D        weights gathered forward and backward, gradients split
    FSDP2                    (2 A + 1) (n - 1) / n * 4 D  the same, gradients split once a step; counted as ZeRO-3
    either, of a head        (A + 1) (n - 1) / n * 4 D    its weights stay whole after the forward (FSDP2 gathers those of its
                                                          layers in the backward too, which is not counted)

A target that the g processes of a group share by `target.parallel` is run by all of them at a time, so that each does the work
of one target; beside the draft's gradients each sends, in a micro-batch of S bytes a state, for L blocks of W bytes in all,

    tensor                   g 2 L 2 (g - 1) / g S        two all-reduces a block, for the micro-batch of each process
    shard                    (g - 1) / g W                every block gathered once, for the micro-batches of all

A target that is spread over the g accelerators of a node by `target.device_map` belongs to one process, whose accelerators run
its blocks one after another: a node does the work of one accelerator. In each micro-batch each hands the states on to the next,
and the last, like every tap, back to the first; between nodes the processes go by DDP.

Where servers run the target (`train.plan.serving`), the other accelerators send their gradients alone, and a step takes as
long as the slower of the two sides.

Weak scaling: every accelerator keeps its own micro-batch, and the global batch grows with n. Efficiency is the time of one
accelerator's work over that of the step, once with nothing sent while anything is computed and once with all of it hidden
behind what is computed, as far as that is long enough; a real run lies between. On several nodes all traffic is taken to go at
an accelerator's share of the network, which is what the slowest link of a ring allows.

Stragglers, failures, the input pipeline and hierarchical collectives are left out. None of it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from configs.schema.commands.planning import HardwareConfig, PlanConfig, PlanHeadsConfig
from heads.frozen.hidden_states import blocks
from train.plan.memory import WIDE, Sharing
from train.plan.models import PlannedModels, count
from train.plan.serving import Serving
from train.plan.work import GIGA, Times

SIZES = (8, 64, 1024)
MICRO = 1e-6
DDP, ZERO2, SPLIT = "ddp, zero1", "zero2", "fsdp2, zero3"
REPLICATED = "whole on each"
ONE_A_NODE, SPREAD = "one process a node", "spread over the node"
SERVED = "states of {count} x {size}"
SHARED = "{kind} {group}"


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


def passes_of(engine: str, num_micro_batches: int, *, head: bool) -> int:
    """Return how often a step passes all weights or all gradients round the ring; see the module's docstring."""
    return {DDP: 2, ZERO2: num_micro_batches + 1, SPLIT: num_micro_batches + 1 if head else 3 * num_micro_batches}[engine]


def scale(
    config: PlanConfig,
    models: PlannedModels,
    times: Times,
    *,
    tokens_per_step: float,
    n: int,
    groups: Sequence[Sharing] = (),
    serving: Serving | None = None,
) -> list[Scaled]:
    """Return a row for each engine and way of holding the target on n accelerators, whatever number the config gives.

    Args:
        models, times: of one accelerator's work.
        tokens_per_step: of one accelerator.
        groups: ways of sharing a target by the processes of a group.
        serving: servers on these accelerators.
    """
    rows, head = [], isinstance(config, PlanHeadsConfig)
    accumulated, trained = config.schedule.gradient_accumulation_steps, WIDE * count(models.draft, trained=True)
    hardware = config.hardware.model_copy(update={"num_accelerators": n})
    for engine in (DDP, ZERO2, SPLIT):
        passes = passes_of(engine, accumulated, head=head)
        sent = ring_bytes(trained, n, passes)
        talking = communication_seconds(sent, hardware, _num_messages(models, n, passes))
        rows.append(_scaled(n, n, engine, REPLICATED, sent, talking, times, tokens_per_step))
    rows += [_shared(config, models, hardware, trained, times, tokens_per_step, group) for group in groups]
    rows.append(_spread(config, models, hardware, trained, times, tokens_per_step))
    return rows if serving is None else [*rows, _served(models, hardware, times, tokens_per_step, serving)]


def communication_seconds(num_bytes: float, hardware: HardwareConfig, num_messages: int) -> float:
    """Return the seconds that an accelerator takes to send so many bytes in so many messages, one after another.

    Within a node at the interconnect's rate; over several nodes at that of each accelerator's share of the network.
    """
    within = hardware.num_accelerators <= hardware.accelerators_per_node
    machine = hardware.machine
    rate = machine.interconnect_gb_per_second if within else machine.network_gb_per_second
    return num_bytes / (rate * GIGA) + num_messages * hardware.latency_microseconds * MICRO


def _shared(
    config: PlanConfig,
    models: PlannedModels,
    hardware: HardwareConfig,
    trained: int,
    times: Times,
    tokens_per_step: float,
    group: Sharing,
) -> Scaled:
    """Return the step of processes that share the target in groups, each within a node."""
    n, g, layers = hardware.num_accelerators, group.group, blocks(models.target)
    if group.kind == "tensor":
        passed, gathers = g * 2 * len(layers) * ring_bytes(_state_bytes(config, models), g, 2), g * 4 * len(layers)
    else:
        weights = sum(each.numel() * each.element_size() for each in layers.parameters())
        passed, gathers = ring_bytes(weights, g, 1), len(layers)
    micro_batches = config.schedule.gradient_accumulation_steps if config.data.cache is None else 0
    passed, gathers = passed * micro_batches, gathers * micro_batches * math.ceil(math.log2(g))
    gradients = ring_bytes(trained, n, 2)
    talking = communication_seconds(passed, hardware.model_copy(update={"num_accelerators": g}), gathers)
    talking += communication_seconds(gradients, hardware, _num_messages(models, n, 2))
    target = SHARED.format(kind=group.kind, group=g)
    return _scaled(n, n, DDP, target, passed + gradients, talking, times, tokens_per_step)


def _spread(
    config: PlanConfig, models: PlannedModels, hardware: HardwareConfig, trained: int, times: Times, tokens_per_step: float
) -> Scaled:
    """Return the step of one process a node, whose accelerators hold the target together."""
    n = hardware.num_accelerators
    held_by = min(n, hardware.accelerators_per_node)
    processes = math.ceil(n / held_by)
    # With a cache the target does not run; alone an accelerator hands nothing on.
    hops = held_by + len(models.taps or ()) if config.data.cache is None and held_by > 1 else 0
    hops *= config.schedule.gradient_accumulation_steps
    handed = hops * _state_bytes(config, models)
    shared = ring_bytes(trained, processes, 2)
    talking = communication_seconds(handed, hardware.model_copy(update={"num_accelerators": held_by}), hops)
    talking += communication_seconds(shared, hardware, _num_messages(models, processes, 2))
    sent = shared + handed / max(held_by, 1)
    return _scaled(n, processes, ONE_A_NODE, SPREAD, sent, talking, times, tokens_per_step)


def gradients_sent(models: PlannedModels, hardware: HardwareConfig, num_processes: int) -> tuple[float, float]:
    """Return the bytes that each of so many processes under DDP sends in a step, and the seconds that takes."""
    sent = ring_bytes(WIDE * count(models.draft, trained=True), num_processes, 2)
    return sent, communication_seconds(sent, hardware, _num_messages(models, num_processes, 2))


def _served(models: PlannedModels, hardware: HardwareConfig, times: Times, tokens_per_step: float, serving: Serving) -> Scaled:
    """Return the step of training from servers; where nothing is hidden, gradients are sent while no training computes."""
    workers, train = serving.trainers, serving.train_seconds
    sent, talking = gradients_sent(models, hardware, workers)
    low, high = (max(each, serving.serve_seconds) for each in (max(train, talking), train + talking))
    return Scaled(
        num_accelerators=hardware.num_accelerators,
        engine=DDP,
        target=SERVED.format(count=serving.count, size=serving.size),
        sent_bytes=sent,
        communication_seconds=talking,
        step_seconds_low=low,
        step_seconds_high=high,
        efficiency_low=workers / hardware.num_accelerators * times.total / high,
        efficiency_high=workers / hardware.num_accelerators * times.total / low,
        tokens_per_second_low=workers * tokens_per_step / high,
        tokens_per_second_high=workers * tokens_per_step / low,
    )


def _state_bytes(config: PlanConfig, models: PlannedModels) -> int:
    """Return the bytes of one hidden state of the target over a micro-batch of the longest rows."""
    width = models.target.config.get_text_config().hidden_size
    row = config.data.row_length or config.data.max_length
    return int(config.schedule.batch_size * row * width * models.target.dtype.itemsize)


def _scaled(
    n: int, workers: int, engine: str, target: str, sent: float, talking: float, times: Times, tokens_per_step: float
) -> Scaled:
    """Return a step on n accelerators, of which `workers` compute at a time."""
    alone = times.total
    apart, hidden = alone + talking, max(alone, talking)
    return Scaled(
        num_accelerators=n,
        engine=engine,
        target=target,
        sent_bytes=sent,
        communication_seconds=talking,
        step_seconds_low=hidden,
        step_seconds_high=apart,
        efficiency_low=workers / n * alone / apart,
        efficiency_high=workers / n * alone / hidden,
        tokens_per_second_low=workers * tokens_per_step / apart,
        tokens_per_second_high=workers * tokens_per_step / hidden,
    )


def _num_messages(models: PlannedModels, n: int, passes: int) -> int:
    """Return how many messages follow one another: trees of depth log2(n), once a pass and layer of the draft."""
    layers = models.draft.config.get_text_config().num_hidden_layers if isinstance(models.draft, PreTrainedModel) else 1
    return math.ceil(math.log2(n)) * passes * layers if n > 1 else 0

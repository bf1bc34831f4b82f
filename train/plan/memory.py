"""Bytes on one accelerator by part, for every way of sharing them out, and which ways fit.

Weights, gradients and optimiser states are counted exactly, what a step of the draft keeps for its backward by running it
without weights (`train.plan.step`). Sharing follows ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 5): stage 1 splits
the optimiser's states, 2 the gradients too, 3 and FSDP2 the weights too. Left out are the allocator's fragments, the engines'
buffers except DDP's, and what interpreter and libraries take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from configs.schema.commands.planning import PlanConfig, PlanHeadsConfig
from distill.loss.chunked import rows_of_chunk
from heads.frozen.hidden_states import blocks
from heads.frozen.processes import expert_weights
from heads.modules.layers import shape_like
from train.plan.models import PlannedModels, count, draft_columns, frozen_copies, target_columns
from train.plan.step import cached_bytes, draft_step

GIBIBYTE = 2**30
WIDE = 4  # bytes of a float32 number
# Of a chunk's logits live at one time: in the matmul's dtype once, in float32 the logarithm, its gradient and a temporary.
WIDE_COPIES_OF_DRAFT_LOGITS, WIDE_COPIES_OF_TARGET_LOGITS = 3, 2
HEADROOM = 0.9  # share of an accelerator's memory that may be used; the rest is for what is not counted


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """A way of sharing a training out over accelerators."""

    recipe: str  # its file in configs/accelerate, without the ending
    on_cpu: str | None = None  # the file for processes without accelerators, where there is one
    several: bool | None = True  # for several processes; False: for one only; None: for any number
    stage: int = 0  # what is split over the processes, by ZeRO's numbers
    spreads_target: bool = False  # one process holds the target on all accelerators of a node (`target.device_map`)
    offloads_states: bool = False  # the optimiser's states and the float32 weights that it steps lie in the host's memory
    group: int = 1  # processes that share the target's blocks, or experts, by `target.parallel`; the rest is whole in each
    kind: str = ""  # by what they share it, `tensor`, `shard` or `expert`

    @property
    def name(self) -> str:
        """The recipe, and whether the target is split or spread beside it."""
        if self.group > 1:
            return f"{self.recipe} with target.parallel.{self.kind}={self.group}"
        return f"{self.recipe} with target.device_map" if self.spreads_target else self.recipe


# From the simplest to the one that needs least of an accelerator.
ENGINES = (
    Sharing(recipe="one_gpu", on_cpu="one_process_cpu", several=False),
    Sharing(recipe="ddp_gpus", on_cpu="ddp_cpu"),
    Sharing(recipe="zero2", stage=2),
    Sharing(recipe="fsdp2", stage=3),
    Sharing(recipe="zero3", stage=3),
    Sharing(recipe="zero3_offload", several=None, stage=3, offloads_states=True),
)
SPREADING = Sharing(recipe="one_gpu", spreads_target=True)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by part before anything is split."""

    target_weights: int
    draft_weights: int
    frozen_draft: int  # frozen weights of the draft, rows of the target's head that a reduced vocabulary copies
    gradients: int
    optimizer_states: int
    draft_activations: int
    target_activations: int
    loss_logits: int
    held_out_kv: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What an engine needs of an accelerator, and why it does not fit where it does not."""

    engine: Sharing
    num_bytes: int
    complaint: str | None


def memory_of(config: PlanConfig, models: PlannedModels, label_share: float) -> Memory:
    """Return the bytes of a step over a micro-batch of the longest rows, and of decoding held-out prompts."""
    trained = count(models.draft, trained=True)
    row = config.data.row_length or config.data.max_length  # a packed row's scores are made of all its pairs
    positions = config.schedule.batch_size * row
    size = _activation_size(config)
    # A chunk's logits, both sides; with a cache of sums the target makes the draft's columns only.
    of_draft = draft_columns(config, models) * (size + WIDE_COPIES_OF_DRAFT_LOGITS * WIDE)
    of_target = target_columns(config, models) * (models.target.dtype.itemsize + WIDE_COPIES_OF_TARGET_LOGITS * WIDE)
    decode, on_cpu = config.held_out.decode, config.hardware.preset == "laptop_cpu"
    a_token, a_state = cached_bytes(models.target)
    # The states after each token of a round are kept until it is known which of its drafts stay.
    of_row = (config.data.max_length + decode.max_new_tokens) * a_token + (decode.num_speculative_tokens + 1) * a_state
    return Memory(
        target_weights=_bytes_of(models.target.parameters()),
        draft_weights=WIDE * trained,
        frozen_draft=WIDE * frozen_copies(models.draft),
        gradients=WIDE * trained,
        optimizer_states=2 * WIDE * trained,
        draft_activations=math.ceil(positions * activation_bytes(config, models, length=row, label_share=label_share)),
        target_activations=positions * _target_state_bytes(config, models),
        loss_logits=rows_of_chunk(config.loss.chunk_size, on_cpu=on_cpu) * (of_draft + of_target),
        held_out_kv=min(decode.batch_size, config.held_out.num_prompts) * of_row,
    )


def activation_bytes(config: PlanConfig, models: PlannedModels, *, length: float, label_share: float) -> float:
    """Return what a step keeps of the draft for its backward over rows of `length` tokens, bytes a token."""
    step = draft_step(config, models, length=length, label_share=label_share)
    # Of a row that becomes logits also the state, and its gradient from the chunked loss.
    return step.kept_bytes + step.judged_rows * models.draft_width * (_activation_size(config) + WIDE)


def needed_bytes(
    memory: Memory,
    engine: Sharing,
    num_accelerators: int,
    *,
    target_block: int,
    target_outside: int = 0,
    head: bool = False,
    accumulates: bool = False,
) -> int:
    """Return the bytes on one accelerator, of a spread target the one that holds the rest as well.

    `target_block` is its largest block, whole while it runs under `shard`; `target_outside` what each process of a group holds.
    ZeRO-3 and FSDP2 gather a `head` as a whole; FSDP2 that `accumulates` splits gradients after a step's last micro-batch.
    """
    n = 1 if engine.several is False or engine.spreads_target else num_accelerators
    states = memory.optimizer_states / (n if engine.stage >= 1 else 1)
    whole_gradients = engine.stage < 2 or (engine.recipe == "fsdp2" and (head or accumulates))
    gradients = memory.gradients / (1 if whole_gradients else n)
    weights = memory.draft_weights / (1 if engine.stage < 3 or head else n)
    target: float = memory.target_weights
    if engine.spreads_target:
        target = target / num_accelerators + target_block
    if engine.group > 1:
        of_group = (target - target_outside) / engine.group
        target = target_outside + of_group + (target_block if engine.kind == "shard" else 0)
    if engine.offloads_states:
        states, weights = 0.0, weights / 2  # what stays is the bfloat16 copy that runs
    # DDP and ZeRO copy gradients into buckets to send them; what is split is sent from where it lies.
    buckets = memory.gradients if n > 1 and engine.stage < 3 else 0
    rest = memory.frozen_draft + memory.draft_activations + memory.target_activations + memory.loss_logits
    return math.ceil(target + weights + gradients + states + buckets + rest + memory.held_out_kv)


def try_engines(config: PlanConfig, models: PlannedModels, memory: Memory) -> list[Fit]:
    """Return the ways for this number of processes, each with the bytes it needs and the reason why it does not fit."""
    hardware, machine, n = config.hardware, config.hardware.machine, config.hardware.num_accelerators
    room = machine.memory_gib * GIBIBYTE * HEADROOM
    of_blocks = [_bytes_of(each.parameters()) for each in blocks(models.target)]
    of_experts = _bytes_of(expert_weights(models.target))
    ends = models.target.get_input_embeddings(), models.target.get_output_embeddings()
    engines = [engine for engine in ENGINES if engine.several in (None, n > 1)]
    spreading = [SPREADING] if 1 < n <= hardware.accelerators_per_node else []
    fits: list[Fit] = []
    for engine in (*engines, *_groups(config, models), *spreading):
        if engine.group > 1 and any(fit.engine.group > 1 and fit.complaint is None for fit in fits):
            continue  # a smaller group does
        needed = needed_bytes(
            memory,
            engine,
            n,
            target_block=max(*of_blocks, *(_bytes_of(each.parameters()) for each in ends)),
            target_outside=memory.target_weights - (of_experts if engine.kind == "expert" else sum(of_blocks)),
            head=isinstance(config, PlanHeadsConfig),
            accumulates=config.schedule.gradient_accumulation_steps > 1,
        )
        complaint = None
        on_host = (memory.optimizer_states + memory.draft_weights + memory.gradients) / n
        if needed > room:
            complaint = f"more than {room / GIBIBYTE:.1f} GiB"
        elif engine.offloads_states and on_host > machine.host_memory_gib * GIBIBYTE:
            complaint = f"the host's {machine.host_memory_gib:g} GiB for each accelerator do not hold the optimiser's states"
        fits.append(Fit(engine=engine, num_bytes=needed, complaint=complaint))
    return fits


def _groups(config: PlanConfig, models: PlannedModels) -> list[Sharing]:
    """Return the ways of sharing a target by the processes of a node, or the one that the config gives."""
    given, text = config.target.parallel, models.target.config.get_text_config()
    if given is not None and given.kind is not None:
        return [Sharing(recipe="ddp_gpus", on_cpu="ddp_cpu", group=given.size, kind=given.kind)]
    n, per_node = config.hardware.num_accelerators, config.hardware.accelerators_per_node
    sizes = [size for size in range(2, min(n, per_node) + 1) if per_node % size == 0 and n % size == 0]
    heads = [getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    counts = [number for number in heads if number is not None]  # recurrent targets have none
    splits = bool(counts and models.target.tp_plan)
    kinds = ["tensor" if splits and not any(number % size for number in counts) else "shard" for size in sizes]
    return [
        Sharing(recipe="ddp_gpus", on_cpu="ddp_cpu", group=size, kind=kind) for size, kind in zip(sizes, kinds, strict=True)
    ]


def _target_state_bytes(config: PlanConfig, models: PlannedModels) -> int:
    """Return bytes a position: the states that are read, and, where the target runs, the widest moment of one block."""
    text = models.target.config.get_text_config()
    size = models.target.dtype.itemsize
    kept = text.hidden_size * (1 + len(models.taps or ())) * size
    if config.data.cache is not None:
        return kept
    return kept + size * (3 * shape_like(models.target).mlp_width + 4 * text.hidden_size)


def _activation_size(config: PlanConfig) -> int:
    return WIDE if config.schedule.mixed_precision == "no" else 2


def _bytes_of(weights: Iterable[nn.Parameter]) -> int:
    return sum(each.numel() * each.element_size() for each in weights)

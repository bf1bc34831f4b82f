"""Bytes on one accelerator by part, for every way of sharing them out, and which ways fit.

Of N trained weights: 4 N bytes of weights, 2 N of their copies under autocast, 4 N of gradients, 8 N of AdamW's states; what a
step keeps for its backward is estimated from the layers' sizes (`draft_work`). Sharing follows ZeRO (Rajbhandari et al. 2020,
arXiv 1910.02054, section 5): stage 1 splits the optimiser's states, 2 the gradients too, 3 and FSDP2 the weights too. Left out
are the allocator's fragments, the engines' buckets, and what interpreter and libraries take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from configs.schema.commands.planning import PlanConfig, PlanHeadsConfig
from distill.loss.fused import rows_of_chunk
from heads.frozen.hidden_states import blocks, num_blocks
from heads.modules.layers import shape_like
from train.plan.models import PlannedModels, count, draft_columns, draft_work, frozen_copies, target_columns

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
    min_processes: int = 2
    max_processes: int | None = None
    stage: int = 0  # what is split over the processes, by ZeRO's numbers
    spreads_target: bool = False  # one process holds the target on all accelerators of a node (`target.device_map`)
    offloads_states: bool = False  # the optimiser's states and the float32 weights that it steps lie in the host's memory
    group: int = 1  # processes that share the target's blocks (`target.shards`); the rest is whole in each

    @property
    def name(self) -> str:
        """The recipe, and whether the target is split or spread beside it."""
        if self.group > 1:
            return f"{self.recipe} with target.shards={self.group}"
        return f"{self.recipe} with target.device_map" if self.spreads_target else self.recipe


# From the simplest to the one that needs least of an accelerator. Heads take stage 2 at most (`train.loop.engines`).
ENGINES = (
    Sharing(recipe="one_gpu", on_cpu="one_process_cpu", min_processes=1, max_processes=1),
    Sharing(recipe="ddp_gpus", on_cpu="ddp_cpu"),
    Sharing(recipe="zero2", stage=2),
    Sharing(recipe="fsdp2", stage=3),
    Sharing(recipe="zero3", stage=3),
    Sharing(recipe="zero3_offload", min_processes=1, stage=3, offloads_states=True),
)
SPREADING = Sharing(recipe="one_gpu", min_processes=1, max_processes=1, spreads_target=True)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by part before anything is split."""

    target_weights: int
    draft_weights: int
    draft_casts: int  # bfloat16 copies of the weights, kept for the backward
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
    trained, target = count(models.draft, trained=True), models.target
    shape, dtype_size = shape_like(target), target.dtype.itemsize
    row = config.data.row_length or config.data.max_length  # tokens
    positions = config.schedule.batch_size * row
    mixed = config.schedule.mixed_precision != "no"
    size = 2 if mixed else WIDE
    of_draft = draft_columns(config, models) * (size + WIDE_COPIES_OF_DRAFT_LOGITS * WIDE)
    of_target = target_columns(config, models) * (dtype_size + WIDE_COPIES_OF_TARGET_LOGITS * WIDE)
    decode, on_cpu = config.held_out.decode, config.hardware.preset == "laptop_cpu"
    states = shape.width * (1 + len(models.taps or ())) * dtype_size  # a position
    if config.data.cache is None:  # the widest moment of one of the target's blocks
        states += dtype_size * (3 * shape.mlp_width + 4 * shape.width)
    keys_and_values = 2 * num_blocks(target) * shape.num_key_value_heads * shape.head_width * dtype_size  # a token
    work = draft_work(config, models, length=row, label_share=label_share)
    return Memory(
        target_weights=_bytes_of(target.parameters()),
        draft_weights=WIDE * trained,
        draft_casts=2 * trained if mixed else 0,
        frozen_draft=WIDE * frozen_copies(models.draft),
        gradients=WIDE * trained,
        optimizer_states=2 * WIDE * trained,
        # Of a row that becomes logits also the state, and its gradient from the chunked loss.
        draft_activations=math.ceil(positions * (work.kept_bytes + work.judged_rows * models.draft_width * (size + WIDE))),
        target_activations=positions * states,
        loss_logits=rows_of_chunk(config.loss.chunk_size, on_cpu=on_cpu) * (of_draft + of_target),
        held_out_kv=min(decode.batch_size, config.held_out.num_prompts)
        * (config.data.max_length + decode.max_new_tokens)
        * keys_and_values,
    )


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
    FSDP2 gathers a `head` as a whole; one that `accumulates` splits gradients after a step's last micro-batch. Where weights
    are split, a whole draft and a copy of it are there before.
    """
    n = 1 if engine.max_processes == 1 else num_accelerators
    target: float = memory.target_weights
    if engine.spreads_target:
        target = target / num_accelerators + target_block
    if engine.group > 1:
        target = target_outside + (target - target_outside) / engine.group + target_block
    states = memory.optimizer_states / (n if engine.stage >= 1 else 1)
    whole_gradients = engine.stage < 2 or (engine.recipe == "fsdp2" and (head or accumulates))
    gradients = memory.gradients / (1 if whole_gradients else n)
    split = 1 if engine.stage < 3 or head else n
    weights, casts = memory.draft_weights / split, memory.draft_casts / split
    if engine.offloads_states:
        states = weights = 0.0  # what stays is the bfloat16 copy that runs
    rest = memory.frozen_draft + memory.draft_activations + memory.target_activations + memory.loss_logits
    in_a_step = weights + casts + gradients + states + rest + memory.held_out_kv
    at_the_start = 2 * memory.draft_weights + memory.frozen_draft if engine.stage == 3 else 0
    return math.ceil(target + max(in_a_step, at_the_start))


def try_engines(config: PlanConfig, models: PlannedModels, memory: Memory) -> list[Fit]:
    """Return the ways for this number of processes, each with the bytes it needs and the reason why it does not fit."""
    hardware, machine, n = config.hardware, config.hardware.machine, config.hardware.num_accelerators
    room, per_node = machine.memory_gib * GIBIBYTE * HEADROOM, hardware.accelerators_per_node
    head = isinstance(config, PlanHeadsConfig)
    of_blocks = [_bytes_of(each.parameters()) for each in blocks(models.target)]
    ends = models.target.get_input_embeddings(), models.target.get_output_embeddings()
    engines = [each for each in ENGINES if each.min_processes <= n <= (each.max_processes or n)]
    if head:
        engines = [each for each in engines if not each.recipe.startswith("zero3")]
    sizes = [size for size in range(2, min(n, per_node) + 1) if per_node % size == 0 and n % size == 0]
    for size in [config.target.shards] if config.target.is_split else sizes:
        engines.append(Sharing(recipe="ddp_gpus", on_cpu="ddp_cpu", group=size))
    if 1 < n <= per_node:
        engines.append(SPREADING)
    fits: list[Fit] = []
    for engine in engines:
        if engine.group > 1 and any(fit.engine.group > 1 and fit.complaint is None for fit in fits):
            continue  # a smaller group does
        needed = needed_bytes(
            memory,
            engine,
            n,
            target_block=max(*of_blocks, *(_bytes_of(each.parameters()) for each in ends)),
            target_outside=memory.target_weights - sum(of_blocks),
            head=head,
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


def _bytes_of(weights: Iterable[nn.Parameter]) -> int:
    return sum(each.numel() * each.element_size() for each in weights)

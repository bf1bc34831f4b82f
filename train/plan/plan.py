"""A whole plan: what a recipe takes in memory and on disk.

Of N trained weights one process holds 4 N bytes of weights, 2 N of their copies under autocast, 4 N of gradients, 8 N of
AdamW's states; what a step keeps for its backward is estimated from the layers' sizes (`draft_work`). Sharing follows ZeRO
(Rajbhandari et al. 2020, arXiv 1910.02054, section 5): stage 1 splits the optimiser's states, 2 the gradients too, 3 and FSDP2
the weights too. Left out are the allocator's fragments, the engines' buckets, and what interpreter and libraries take. Packed
rows count as full. No seconds are planned: `draftsmith run` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.commands.planning import PlanConfig, PlanHeadsConfig, WorkloadConfig
from configs.schema.data import CacheConfig
from distill.cache.writer import layout_of
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import open_conversations
from distill.loss.fused import rows_of_chunk
from heads.frozen.hidden_states import blocks, num_blocks, reads_by_document
from heads.modules.layers import shape_like
from train.plan.models import PlannedModels, count, draft_work, frozen_copies, plan_models

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
    alone: bool = False  # for one process
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


# From the simplest to the one that needs least of an accelerator.
ALONE = Sharing(recipe="one_gpu", on_cpu="one_process_cpu", alone=True)
ENGINES = (
    Sharing(recipe="ddp_gpus", on_cpu="ddp_cpu"),
    Sharing(recipe="zero2", stage=2),
    Sharing(recipe="fsdp2", stage=3),
    Sharing(recipe="zero3", stage=3),
)
OFFLOADING = Sharing(recipe="zero3_offload", stage=3, offloads_states=True)
SPREADING = Sharing(recipe="one_gpu", alone=True, spreads_target=True)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What an engine needs of an accelerator, and why it does not fit where it does not."""

    engine: Sharing
    num_bytes: int
    complaint: str | None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training data as a plan sees it."""

    num_conversations: int  # in an epoch
    mean_tokens: float  # of a conversation
    label_share: float  # of those tokens


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recipe takes."""

    config: PlanConfig
    models: PlannedModels
    work: Workload
    memory: dict[str, int]  # bytes by part, before anything is split
    cache_row_bytes: int
    cache_rows: int
    fits: list[Fit]

    @property
    def fitting(self) -> Fit | None:
        """The simplest way that fits."""
        return next((fit for fit in self.fits if fit.complaint is None), None)

    @property
    def num_processes(self) -> int:
        """How many processes train by it: one an accelerator, or one where it spreads the target over a node."""
        spreads = self.fitting is not None and self.fitting.engine.spreads_target
        return 1 if spreads else self.config.hardware.num_accelerators

    @property
    def checkpoint_bytes(self) -> int:
        """Of a checkpoint's weights and optimiser state on disk."""
        return 12 * count(self.models.draft, trained=True) + 4 * frozen_copies(self.models.draft)


def make_plan(config: PlanConfig) -> Plan:
    """Return the plan of a recipe; an InputError says where target, draft or data are not there, or do not go together."""
    models = plan_models(config)
    config = models.config
    work, data = _measure_workload(config), config.data
    memory = memory_of(config, models, work)
    # Of the cache that the recipe can learn from, in the cache's default dtype.
    cache = CacheConfig(target=config.target, data=data.train, max_length=data.max_length, taps=sorted(models.taps or ()))
    return Plan(
        config=config,
        models=models,
        work=work,
        memory=memory,
        cache_row_bytes=layout_of(cache, models.target).bytes_per_row,
        cache_rows=round(work.num_conversations * work.mean_tokens),
        fits=try_engines(config, models, memory),
    )


def memory_of(config: PlanConfig, models: PlannedModels, data: Workload) -> dict[str, int]:
    """Return the bytes of a step over a micro-batch of the longest rows, and of decoding held-out prompts, by part."""
    trained, target = count(models.draft, trained=True), models.target
    shape, dtype_size = shape_like(target), target.dtype.itemsize
    row = config.data.row_length or config.data.max_length  # tokens
    positions, mixed = config.schedule.batch_size * row, config.schedule.mixed_precision != "no"
    size = 2 if mixed else WIDE
    length = min(row, data.mean_tokens) if config.data.packing else row  # of a conversation
    work = draft_work(config, models, length=length, label_share=data.label_share)
    of_draft = work.columns * (size + WIDE_COPIES_OF_DRAFT_LOGITS * WIDE)
    of_target = work.target_columns * (dtype_size + WIDE_COPIES_OF_TARGET_LOGITS * WIDE)
    states = shape.width * (1 + len(models.taps or ())) * dtype_size  # a position
    if config.data.cache is None:  # the widest moment of one of the target's blocks
        states += dtype_size * (3 * shape.mlp_width + 4 * shape.width)
    decode = config.held_out.decode
    kv_of_token = 2 * num_blocks(target) * shape.num_key_value_heads * shape.head_width * dtype_size
    kv_tokens = min(decode.batch_size, config.held_out.num_prompts) * (config.data.max_length + decode.max_new_tokens)
    return {
        "target weights": _bytes_of(target),
        "draft weights": WIDE * trained,
        "draft casts": 2 * trained if mixed else 0,  # copies of the weights in 16 bits, kept for the backward
        "frozen draft": WIDE * frozen_copies(models.draft),
        "gradients": WIDE * trained,
        "optimizer states": 2 * WIDE * trained,
        # Of a row that becomes logits also the state, and its gradient from the chunked loss.
        "draft activations": math.ceil(positions * (work.kept_bytes + work.judged_rows * models.draft_width * (size + WIDE))),
        "target activations": positions * states,
        "attention masks": mask_bytes(config, models),
        "loss logits": rows_of_chunk(config.loss.chunk_size, on_cpu=config.hardware.on_cpu) * (of_draft + of_target),
        "held-out keys and values": kv_tokens * kv_of_token,
    }


def mask_bytes(config: PlanConfig, models: PlannedModels) -> int:
    """Return the bytes of masks of all pairs of a row's positions: where rows are packed, and of a head that is an MTP block.

    A pair takes a boolean, and a number in the attention that reads it, which every layer keeps for its backward.
    """
    data, row = config.data, config.data.row_length or config.data.max_length
    of_target, of_draft = 0, 0
    if data.packing and data.cache is None and not reads_by_document(row, on_cpu=config.hardware.on_cpu):
        of_target = 1 + models.target.dtype.itemsize
    size = 2 if config.schedule.mixed_precision != "no" else WIDE
    if isinstance(models.draft, PreTrainedModel):
        kept = 1 if config.schedule.activation_checkpointing else num_blocks(models.draft)
        of_draft = (1 + size * kept) * bool(data.packing)
    elif isinstance(config, PlanHeadsConfig) and config.head.kind == "mtp":  # a square for each depth so far
        squares = range(0 if data.packing else 1, config.head.num_depths)
        of_draft = (1 + size) * sum(number + 1 for number in squares)
    return config.schedule.batch_size * row**2 * max(of_target, of_draft)


def try_engines(config: PlanConfig, models: PlannedModels, memory: Mapping[str, int]) -> list[Fit]:
    """Return the ways for this number of processes, each with the bytes it needs and the reason why it does not fit."""
    (memory_gib, host_gib), n = config.hardware.room_gib, config.hardware.num_accelerators
    room = memory_gib * GIBIBYTE * HEADROOM
    on_host = sum(memory[part] for part in ("optimizer states", "draft weights", "gradients")) / n
    fits: list[Fit] = []
    for engine in _ways(config):
        if engine.group > 1 and any(fit.engine.group > 1 and fit.complaint is None for fit in fits):
            continue  # a smaller group does
        needed, complaint = _bytes_by(engine, config, models, memory), None
        if needed > room:
            complaint = f"more than {room / GIBIBYTE:.1f} GiB"
        elif engine.offloads_states and on_host > host_gib * GIBIBYTE:
            complaint = f"the host's {host_gib:g} GiB for each accelerator do not hold the optimiser's states"
        fits.append(Fit(engine=engine, num_bytes=needed, complaint=complaint))
    return fits


def _bytes_by(engine: Sharing, config: PlanConfig, models: PlannedModels, memory: Mapping[str, int]) -> int:
    """Return the bytes on one accelerator, of a spread target the one that holds the rest as well."""
    n, head = config.hardware.num_accelerators, isinstance(config, PlanHeadsConfig)
    own: dict[str, float] = {**memory}
    of_blocks = [_bytes_of(each) for each in blocks(models.target)]
    ends = models.target.get_input_embeddings(), models.target.get_output_embeddings()
    largest = max(*of_blocks, *map(_bytes_of, ends))  # is whole while it runs
    if engine.spreads_target:
        own["target weights"] = memory["target weights"] / n + largest
    if engine.group > 1:
        own["target weights"] -= sum(of_blocks) * (1 - 1 / engine.group) - largest
    if engine.stage >= 1:
        own["optimizer states"] /= n
    # FSDP2 gathers a head as a whole, and splits gradients after a step's last micro-batch.
    gathers = engine.recipe == "fsdp2" and (head or config.schedule.gradient_accumulation_steps > 1)
    if engine.stage >= 2 and not gathers:
        own["gradients"] /= n
    if engine.stage == 3 and not head:
        own |= {name: own[name] / n for name in ("draft weights", "draft casts")}
    if engine.offloads_states:  # what stays is the 16-bit copy that runs
        own |= {"draft weights": 0.0, "optimizer states": 0.0}
    # Where weights are split, a whole draft and a copy of it are there before.
    at_the_start = own["target weights"] + 2 * memory["draft weights"] + memory["frozen draft"]
    return math.ceil(max(sum(own.values()), at_the_start if engine.stage == 3 else 0))


def _ways(config: PlanConfig) -> list[Sharing]:
    """Return the ways that a number of processes has, simplest first; heads take stage 2 at most (`train.loop.engines`)."""
    n, per_node = config.hardware.num_accelerators, config.hardware.accelerators_per_node
    ways = [*([ALONE] if n == 1 else ENGINES), OFFLOADING]
    if isinstance(config, PlanHeadsConfig):
        ways = [each for each in ways if not each.recipe.startswith("zero3")]
    sizes = [size for size in range(2, min(n, per_node) + 1) if per_node % size == 0 and n % size == 0]
    for size in [config.target.shards] if config.target.is_split else sizes:
        ways.append(Sharing(recipe="ddp_gpus", on_cpu="ddp_cpu", group=size))
    return [*ways, SPREADING] if 1 < n <= per_node else ways


def _measure_workload(config: PlanConfig) -> Workload:
    """Return the amount of data of an epoch; the config's section workload takes precedence over the data."""
    given = {name: value for name, value in config.workload.model_dump().items() if value is not None}
    train, max_length = Path(config.data.train), config.data.max_length
    if len(given) < len(WorkloadConfig.model_fields):
        if not train.is_file():
            missing = ", ".join(f"workload.{name}" for name in WorkloadConfig.model_fields if name not in given)
            raise InputError(f"data.train: {train} does not exist; make it, or give {missing}")
        dataset = ConversationDataset(open_conversations(train), max_length, config.data.num_conversations)
        num_tokens = int(dataset.lengths.sum())
        means = {"mean_tokens": num_tokens / len(dataset), "label_share": dataset.num_labels / num_tokens}
        given = {"num_conversations": len(dataset)} | means | given
    return Workload(**given | {"mean_tokens": min(given["mean_tokens"], max_length)})


def _bytes_of(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())

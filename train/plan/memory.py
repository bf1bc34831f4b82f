"""Bytes on one accelerator by part, for every way of sharing them out, and which way is the smallest that fits.

Weights, gradients and optimiser states are counted exactly. What a step keeps for its backward is reckoned from the layers: a
linear layer keeps what it reads, and what comes out of it is kept by what follows; a norm keeps what it reads and what it made
of that, in float32. Sharing follows ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 5): stage 1 splits the optimiser's
states, 2 the gradients too, 3 and FSDP2 the weights too; of a head the weights stay whole (`Engine.keeps_whole`). They split
what is trained; a target that is too large is spread over the accelerators of a node by `target.device_map`, for one process
(`heads.target.placement`).

Left out on purpose: the allocator's fragments, the engines' own buffers but DDP's, and what the interpreter and libraries take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from configs.schema.planning import PlanConfig, PlanHeadsConfig
from train.plan.models import Models, count, frozen_copies
from train.plan.uses import Workload, linear_layers, norms
from train.plan.work import Sizes, attention_width, uses_of

GIBIBYTE = 2**30
WIDE = 4  # bytes of a float32 number
# Of a chunk's logits live at one time: in the matmul's dtype once, in float32 the logarithm, its gradient and a temporary.
WIDE_COPIES_OF_DRAFT_LOGITS, WIDE_COPIES_OF_TARGET_LOGITS = 3, 2
HEADROOM = 0.9  # of an accelerator's memory is to be used; the rest is for what is not counted


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A way of running a recipe.

    recipe: its file in configs/accelerate, without the ending.
    on_cpu: the file for processes without accelerators, where there is one.
    several: for several processes; False: for one only; None: for any number.
    stage: what is split over the processes, by ZeRO's numbers; 0: nothing.
    spreads_target: one process a node holds the frozen target on all of its accelerators, and the rest on one of them.
    several_nodes: for several nodes; False: for one; None: for any number.
    offloads_states: the optimiser's states and the float32 weights that it steps lie in the host's memory.
    """

    recipe: str
    on_cpu: str | None = None
    several: bool | None = True
    stage: int = 0
    spreads_target: bool = False
    several_nodes: bool | None = None
    offloads_states: bool = False

    @property
    def name(self) -> str:
        """The recipe, and whether the target is spread beside it."""
        return self.recipe + (" with target.device_map" if self.spreads_target else "")

    @property
    def splits_weights(self) -> bool:
        """Whether a draft LM's weights are split."""
        return self.stage >= 3

    def keeps_whole(self, *, head: bool) -> tuple[bool, bool]:
        """Say whether weights and gradients are whole on each accelerator while a step runs.

        A head is one unit (`train.tasks.head`): ZeRO-3 keeps its weights everywhere, and FSDP2 gathers all of them at once and
        has all gradients before it splits them.
        """
        return self.stage < 3 or head, self.stage < 2 or (head and self.recipe == FSDP2)


FSDP2 = "fsdp2"
# From the simplest to the one that asks least of an accelerator.
ENGINES = (
    Engine(recipe="one_gpu", on_cpu="one_process_cpu", several=False),
    Engine(recipe="ddp_gpus", on_cpu="ddp_cpu"),
    Engine(recipe="zero1", stage=1),
    Engine(recipe="zero2", stage=2),
    Engine(recipe=FSDP2, stage=3),
    Engine(recipe="zero3", stage=3),
    Engine(recipe="zero3_offload", several=None, stage=3, offloads_states=True),
    Engine(recipe="one_gpu", spreads_target=True, several_nodes=False),
    Engine(recipe="ddp_gpus", spreads_target=True, several_nodes=True),
)


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


def memory_of(config: PlanConfig, models: Models, work: Workload) -> Memory:
    """Return the bytes of a step over a micro-batch of the longest rows, and of decoding held-out prompts."""
    trained = count(models.draft, trained=True)
    row = config.data.row_length or config.data.max_length  # a packed row's scores are made of all its pairs
    positions = config.schedule.batch_size * row
    longest = Workload(num_conversations=1, mean_tokens=row, label_share=work.label_share)
    return Memory(
        target_weights=sum(each.numel() * each.element_size() for each in models.target.parameters()),
        draft_weights=WIDE * trained,
        frozen_draft=_frozen_bytes(models),
        gradients=WIDE * trained,
        optimizer_states=2 * WIDE * trained,
        draft_activations=math.ceil(positions * activation_bytes(config, models, longest)),
        target_activations=positions * _target_state_bytes(config, models),
        loss_logits=_loss_bytes(config, models),
        held_out_kv=_held_out_bytes(config, models),
    )


def activation_bytes(config: PlanConfig, models: Models, work: Workload) -> float:
    """Return what a step keeps of the draft for its backward, bytes a token of the batch."""
    narrow = WIDE if config.schedule.mixed_precision == "no" else 2
    uses, sizes = uses_of(config, work), Sizes.of(config, models)
    linear = sum(uses.of_layer(name) * (layer.in_features + layer.out_features) for name, layer in linear_layers(models.body))
    normed = sum(uses.of_layer(name) * 2 * width for name, width in norms(models.body))
    heads = attention_width(models.target) // _head_width(models.target)
    score = WIDE if narrow == WIDE else WIDE + narrow  # the softmax, and its copy in the matmul's dtype
    scores = uses.kept_scores * heads * score * _attending(models)
    judged = uses.judged_rows * sizes.draft_width * (narrow + WIDE)  # the state, and its gradient from the chunked loss
    return narrow * linear + WIDE * normed + scores + judged


def needed_bytes(
    memory: Memory,
    engine: Engine,
    num_accelerators: int,
    *,
    target_block: int,
    accelerators_per_node: int = 8,
    head: bool = False,
) -> int:
    """Return the bytes on one accelerator, of a spread target the one that holds the rest as well.

    Args:
        memory: of the recipe.
        engine: how they are shared out.
        num_accelerators: over which.
        target_block: bytes of the target's largest block, by which the shares of a spread target differ.
        accelerators_per_node: over which a target is spread.
        head: whether the draft is a head; see `Engine.keeps_whole`.
    """
    n = 1 if engine.several is False else num_accelerators
    held_by = min(n, accelerators_per_node) if engine.spreads_target else 1
    n = math.ceil(n / held_by)  # processes
    states = memory.optimizer_states / (n if engine.stage >= 1 else 1)
    whole_weights, whole_gradients = engine.keeps_whole(head=head)
    gradients = memory.gradients / (1 if whole_gradients else n)
    weights = memory.draft_weights / (1 if whole_weights else n)
    target = memory.target_weights / held_by + (target_block if held_by > 1 else 0)
    if engine.offloads_states:
        states, weights = 0.0, weights / 2  # what stays is the bfloat16 copy that runs
    # DDP and ZeRO copy gradients into buckets to send them; what is split is sent from where it lies.
    buckets = memory.gradients if n > 1 and not engine.splits_weights else 0
    rest = memory.frozen_draft + memory.draft_activations + memory.target_activations + memory.loss_logits
    return math.ceil(target + weights + gradients + states + buckets + rest + memory.held_out_kv)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether an engine fits, and why not."""

    engine: Engine
    num_bytes: int
    complaint: str | None


def try_engines(config: PlanConfig, models: Models, memory: Memory) -> list[Fit]:
    """Return the ways for this number of processes, with what each needs of an accelerator and what speaks against it."""
    hardware, machine = config.hardware, config.hardware.machine
    room = machine.memory_gib * GIBIBYTE * HEADROOM
    block = target_block_bytes(models.target)
    several, per_node = hardware.num_accelerators > 1, hardware.accelerators_per_node
    several_nodes, head = hardware.num_accelerators > per_node, isinstance(config, PlanHeadsConfig)
    fits = []
    for engine in ENGINES:
        if engine.several not in (None, several) or engine.several_nodes not in (None, several_nodes):
            continue
        needed = needed_bytes(
            memory, engine, hardware.num_accelerators, target_block=block, accelerators_per_node=per_node, head=head
        )
        complaint = None
        if needed > room:
            complaint = f"{needed / GIBIBYTE:.1f} GiB of {room / GIBIBYTE:.1f}; {_largest_part(memory, engine, head=head)}"
        elif engine.offloads_states and _host_bytes(memory, hardware.num_accelerators) > machine.host_memory_gib * GIBIBYTE:
            complaint = f"the host's {machine.host_memory_gib:g} GiB for each accelerator do not hold the optimiser's states"
        fits.append(Fit(engine=engine, num_bytes=needed, complaint=complaint))
    return fits


def target_block_bytes(target: PreTrainedModel) -> int:
    """Return the bytes of the target's largest piece that runs as one: a block, the embedding or the head."""
    pieces = [*dict(target.base_model.named_children()).values(), target.get_output_embeddings()]
    lists = [each for each in pieces if isinstance(each, torch.nn.ModuleList)]
    whole = [each for each in pieces if each is not None and not isinstance(each, torch.nn.ModuleList)]
    return max(_bytes_of(each) for each in [*whole, *(block for blocks in lists for block in blocks)])


def _largest_part(memory: Memory, engine: Engine, *, head: bool) -> str:
    """Name the largest part that this engine leaves whole."""
    whole_weights, whole_gradients = engine.keeps_whole(head=head)
    parts = {
        "the target's weights": 0 if engine.spreads_target else memory.target_weights,
        "the optimiser's states": 0 if engine.stage >= 1 else memory.optimizer_states,
        "the gradients": memory.gradients if whole_gradients else 0,
        "the draft's weights": memory.draft_weights if whole_weights else 0,
        "the draft's activations": memory.draft_activations,
        "the target's activations": memory.target_activations,
        "the frozen part of the draft": memory.frozen_draft,
        "the loss's logits": memory.loss_logits,
    }
    name = max(parts, key=lambda each: parts[each])
    return f"the largest part that is not split is {name}, {parts[name] / GIBIBYTE:.1f} GiB"


def _host_bytes(memory: Memory, num_accelerators: int) -> float:
    return (memory.optimizer_states + memory.draft_weights + memory.gradients) / num_accelerators


def _frozen_bytes(models: Models) -> int:
    return WIDE * frozen_copies(models.draft)


def _target_state_bytes(config: PlanConfig, models: Models) -> int:
    """Return bytes a position: the states that are read, and, where the target runs, the widest moment of one block."""
    text = models.target.config.get_text_config()
    size = models.target.dtype.itemsize
    kept = text.hidden_size * (1 + len(models.taps or ())) * size
    if config.data.cache is not None:
        return kept
    return kept + size * (3 * text.intermediate_size + 4 * text.hidden_size)


def _loss_bytes(config: PlanConfig, models: Models) -> int:
    """Return the bytes of a chunk's logits, both sides; with a cache of sums the target makes the draft's columns only."""
    sizes = Sizes.of(config, models)
    narrow = WIDE if config.schedule.mixed_precision == "no" else 2
    draft = sizes.draft_vocab * (narrow + WIDE_COPIES_OF_DRAFT_LOGITS * WIDE)
    target = sizes.target_columns * (models.target.dtype.itemsize + WIDE_COPIES_OF_TARGET_LOGITS * WIDE)
    return config.loss.chunk_size * (draft + target)


def _held_out_bytes(config: PlanConfig, models: Models) -> int:
    """Return the bytes of the target's keys and values while held-out prompts are decoded."""
    text, decode = models.target.config.get_text_config(), config.held_out.decode
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    rows = min(decode.batch_size, config.held_out.num_prompts)
    a_token = 2 * text.num_hidden_layers * heads * _head_width(models.target) * models.target.dtype.itemsize
    return int(rows * (config.data.max_length + decode.max_new_tokens) * a_token)


def _attending(models: Models) -> int:
    return 1 if isinstance(models.draft, PreTrainedModel) else sum("q_proj" in name for name, _ in linear_layers(models.draft))


def _head_width(model: PreTrainedModel) -> int:
    text = model.config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())

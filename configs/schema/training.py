"""The configs of the two trainings, `train/distill.py` and `train/heads.py`: data, draft, divergence, optimiser, schedule.

What a head is made of is in `configs.schema.heads`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from configs.runtime.loading import read_values
from configs.schema.base import (
    AUTO,
    AutoBlocks,
    AutoFloat,
    AutoInt,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Settings,
    Share,
    Temperature,
    unless_rising,
)
from configs.schema.decoding import DecodeConfig
from configs.schema.heads import Eagle3Settings, HeadConfig
from configs.schema.target import TargetConfig


class LoraSettings(Settings):
    """Low-rank adapters on the initial draft, trained in place of its weights and merged into them in the artifact."""

    rank: PositiveInt = 16  # of the adapters
    alpha: PositiveInt = 32  # the adapters' output is scaled by alpha / rank
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # on the input of the adapters


def _default_layers(student: dict[str, Any]) -> list[int] | None:
    """Keep the first four blocks by default; on SmolLM2 they draft better than the first and last two."""
    return [0, 1, 2, 3] if student.get("init") == "target_layers" else None


class StudentConfig(Settings):
    """The draft before training: some of the target's layers, any smaller model, or a new one."""

    init: Literal["target_layers", "model", "fresh"] = "target_layers"  # what the draft starts from
    # target_layers: the target's blocks to keep, from 0, in order; by default the first four; auto: the first tenth
    layers: AutoBlocks | None = Field(default_factory=_default_layers)
    path: str | None = None  # model: folder or Hub id
    # fresh: what differs from the target's own config, e.g. {num_hidden_layers: 4, hidden_size: 256}
    overrides: dict[str, bool | int | float | str] | None = None
    train_embeddings: bool = False  # those of init fresh are trained in any case
    # tokens the draft can propose, the most frequent in answers; None: all; auto: as of heads
    draft_vocab_size: AutoInt | None = None
    lora: LoraSettings | None = None  # None: train the weights themselves

    def objections(self) -> Iterator[str]:
        for name, init in (("layers", "target_layers"), ("path", "model"), ("overrides", "fresh")):
            if (self.init == init) != (getattr(self, name) is not None):
                yield f"{name} is needed for init {init!r}, and only there"
        if self.lora is not None and self.init == "fresh":
            yield "lora adapts trained weights; init 'fresh' makes random ones"
        if self.layers == []:
            yield "layers must keep at least one block"
        if self.layers != AUTO:
            yield from unless_rising("layers", self.layers, "block")


DivergenceName = Literal[
    "forward_kl",
    "reverse_kl",
    "jsd",
    "total_variation",
    "negative_log_acceptance",
    "kl_tv_blend",
    "cross_entropy",
]


class JsdSettings(Settings):
    """The Jensen-Shannon divergence, rescaled so that its ends are the two KLs."""

    beta: Share = 0.5  # 0 is the forward KL, 1 the reverse KL


class BlendSettings(Settings):
    """KL that gives way to total variation as a position's acceptance grows: the KL's weight is exp(-eta acceptance)."""

    eta: NonNegativeFloat = 3.0  # 0 is the forward KL


class DivergenceSettings(Settings):
    """Settings of single divergences, read where the divergence is used."""

    jsd: JsdSettings = JsdSettings()
    kl_tv_blend: BlendSettings = BlendSettings()


class LossConfig(Settings):
    """The divergence between the target's and the draft's distribution of the next token: a single one, or a mix."""

    # between the target's and the draft's distribution: a name, or weights by name, e.g. {forward_kl: 1.0, cross_entropy: 0.1}
    divergence: dict[DivergenceName, NonNegativeFloat] = {"forward_kl": 1.0}
    settings: DivergenceSettings = DivergenceSettings()
    temperature: PositiveFloat = 1.0  # divides both sides' logits; cross-entropy stays at 1
    chunk_size: PositiveInt | None = None  # positions whose logits live at one time; null: 128, on a GPU 2,048
    # torch.compile joins the passes over a chunk's logits; null: on CUDA devices, and on CPUs with a C++ compiler where the
    # draft's vocabulary has 1,024 tokens or more
    compiled: bool | None = None

    def objections(self) -> Iterator[str]:
        if not self.weights:
            yield f"at least one weight of divergence must be above 0, got {self.divergence}"

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each divergence in use."""
        return {str(name): weight for name, weight in self.divergence.items() if weight}

    @field_validator("divergence", mode="before")
    @classmethod
    def _a_single_one_is_named_by_text(cls, value: Any) -> Any:
        return {value: 1.0} if isinstance(value, str) else value


class OptimizerConfig(Settings):
    """AdamW with linear warm-up and a cosine to `final_share` of the learning rate."""

    # at its highest; auto: 1e-3 for heads, 3e-3 for draft LMs, and above a target's width of 576 times the root of 576 / width
    learning_rate: AutoFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0  # of AdamW, on matrices
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of AdamW
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95  # of AdamW
    max_grad_norm: PositiveFloat = 1.0  # larger gradients are scaled down to this norm
    warmup_share: Share = 0.05  # of the steps, in which the learning rate rises
    final_share: Share = 0.1  # of the learning rate, where the cosine ends: after the last step


class PolicyConfig(Settings):
    """On-policy rows: answers that the draft writes during training, and that the target supervises (GKD)."""

    on_policy: PositiveShare | None = None  # of each batch: the draft writes the answer anew; None: of no row
    temperature: Temperature = 1.0  # of the draft's draws; 0 is greedy


class TrainingDataConfig(Settings):
    """Conversations written by `scripts/data.py`."""

    train: str = "runs/data/train.jsonl"  # conversations to train on
    held_out: str = "runs/data/held_out.jsonl"  # conversations that are never trained on
    # Train on so many of `train`, drawn at random, the same in every run and fewer ones part of more; None: on all. The draft
    # vocabulary is chosen from all
    num_conversations: PositiveInt | None = None
    # tokens; longer conversations are cut at the end; auto: the target's context, at most 2,048
    max_length: AutoInt = 512
    cache: str | None = None  # a folder made of `train` by `scripts/cache.py`; None: the target runs on every batch
    # Several conversations in a row, kept apart; schedule.batch_size then counts rows. None: a row is one, padded to its batch
    packing: Literal[True] | None = None
    # packing: tokens a row. None: four times max_length. Longer rows pad less, and cost more attention where it is dense
    pack_length: PositiveInt | None = None

    def objections(self) -> Iterator[str]:
        if self.pack_length is not None and self.packing is None:
            yield "pack_length is for packed rows: set packing to true, or pack_length to null"
        if self.pack_length is not None and self.max_length != AUTO and self.pack_length < self.max_length:
            yield f"pack_length must be at least max_length, for any conversation, got {self.pack_length} and {self.max_length}"

    @property
    def row_length(self) -> int | None:
        """Tokens that a packed row has room for; None where rows are not packed."""
        return (self.pack_length or 4 * self.max_length) if self.packing else None


class ScheduleConfig(Settings):
    """Batches, length and intervals of a training run; intervals are in optimiser steps."""

    batch_size: PositiveInt = 8  # conversations (data.packing: rows of them) a process and micro-batch
    gradient_accumulation_steps: PositiveInt = 1  # micro-batches of an optimiser step, in each process
    epochs: PositiveInt = 1  # passes over the training data
    max_steps: PositiveInt | None = None  # in place of epochs, fewer steps or more
    mixed_precision: Literal["no", "bf16"] = "bf16"  # dtype of matrix products in training; no: the weights'
    # Each layer of the draft keeps its input alone for the backward, and runs again in it: less memory, slower steps.
    activation_checkpointing: Literal[True] | None = None
    log_every_steps: PositiveInt = 10  # steps between log lines
    eval_every_steps: PositiveInt | None = None  # None: only at the end
    checkpoint_every_steps: PositiveInt | None = None  # None: only at the end
    keep_checkpoints: PositiveInt = 2  # the newest; that of the best step stays as well
    process_timeout_seconds: PositiveInt = 600  # how long several processes wait for one of them
    resume: bool = True  # go on from the newest checkpoint in the output folder
    # Where metrics are shown, beside metrics.jsonl.
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = ["tensorboard"]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # numpy, which is seeded as well, takes no larger one


class HeldOutDecodingConfig(Settings):
    """The decoder run on held-out prompts during training; the best checkpoint is chosen by its tokens per target step."""

    num_prompts: PositiveInt = 8  # of the held-out conversations
    decode: DecodeConfig = DecodeConfig(max_new_tokens=48)

    def objections(self) -> Iterator[str]:
        if self.decode.lossy is not None:
            yield "decode.lossy must be null: a lossy rule keeps drafts that the target would not have written"


def unless_read(target: TargetConfig, held_out: HeldOutDecodingConfig) -> Iterator[str]:
    """Object to what cannot be had of a target that servers run."""
    if target.states is None:
        return
    if held_out.decode.tree is not None:
        yield "held_out.decode.tree: target.states gives the states of texts, and drafts of a tree are none; set it to null"
    if held_out.decode.kv_cache is not None:
        yield "held_out.decode.kv_cache: with target.states the servers keep the target's keys and values; set it to null"


class DistillConfig(Settings):
    """`train/distill.py`: distil the target into a small draft model."""

    target: TargetConfig = TargetConfig()
    data: TrainingDataConfig = TrainingDataConfig()
    student: StudentConfig = StudentConfig()
    policy: PolicyConfig = PolicyConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    held_out: HeldOutDecodingConfig = HeldOutDecodingConfig()
    num_speculative_tokens: PositiveInt = 3  # written into the artifact as its default
    output: str = "runs/distill"  # folder of artifact, checkpoints and metrics

    def objections(self) -> Iterator[str]:
        yield from unless_read(self.target, self.held_out)
        wrong = {
            "loss: cross_entropy would take the draft's own tokens for labels; give another divergence": (
                "cross_entropy" in self.loss.weights
            ),
            "data.packing must be null: a row has to be one conversation": self.data.packing is not None,
            "data.cache must be null: no cache holds what the draft writes": self.data.cache is not None,
        }
        for objection, applies in wrong.items():
            if self.policy.on_policy and applies:
                yield f"{objection}, or set policy.on_policy to null"


class SanityConfig(Settings):
    """Checks before a head is trained: write an artifact and read it back, overfit one conversation."""

    enabled: bool = True  # check the head in seconds before a long run
    overfit_steps: PositiveInt = 100  # at most; ends when the decoder accepts a whole block
    learning_rate: PositiveFloat = 3e-3  # of the check


class HeadsConfig(Settings):
    """`train/heads.py`: train a head on the frozen target."""

    target: TargetConfig = TargetConfig()
    data: TrainingDataConfig = TrainingDataConfig()
    head: HeadConfig = Eagle3Settings(kind="eagle3")  # the family and its settings
    # An artifact of the same family and sizes, whose weights and draft vocabulary the head starts from; None: new weights
    init: str | None = None
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    held_out: HeldOutDecodingConfig = HeldOutDecodingConfig()
    sanity: SanityConfig = SanityConfig()
    num_speculative_tokens: PositiveInt = 3  # written into the artifact as its default
    output: str = "runs/heads"  # folder of artifact, checkpoints and metrics

    def objections(self) -> Iterator[str]:
        yield from unless_read(self.target, self.held_out)
        longest = self.head.longest_draft
        for where, section in (("", self), ("held_out.decode.", self.held_out.decode)):
            if longest is not None and section.num_speculative_tokens > longest:
                yield (
                    f"{where}num_speculative_tokens must be at most {longest}, what a {self.head.kind} head of this size can "
                    f"draft, got {section.num_speculative_tokens}; ask for fewer, or change head"
                )


def training_schema(recipe: str) -> type[DistillConfig] | type[HeadsConfig]:
    """Return the schema of a training recipe's file; one with a section `head` is of heads."""
    return HeadsConfig if "head" in read_values(recipe) else DistillConfig

"""The configs of the two trainings, `train/distill.py` and `train/heads.py`, and the sections that both have.

How a draft learns is in `configs.schema.learning`, what a head is made of in `configs.schema.heads`. Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import PositiveFloat, PositiveInt, Settings
from configs.schema.decoding import DecodeConfig
from configs.schema.heads import Eagle3Settings, HeadConfig
from configs.schema.learning import LossConfig, OptimizerConfig, PolicyConfig, StudentConfig
from configs.schema.target import TargetConfig


class TrainingDataConfig(Settings):
    """Conversations written by `scripts/make_data.py`."""

    train: str = "runs/data/train.jsonl"  # conversations to train on
    held_out: str = "runs/data/held_out.jsonl"  # conversations that are never trained on
    max_length: PositiveInt = 512  # tokens; longer conversations are cut at the end
    cache: str | None = None  # a folder made of `train` by `scripts/make_cache.py`; None: the target runs on every batch
    # Several conversations in a row, kept apart; schedule.batch_size then counts rows. None: a row is one, padded to its batch
    packing: Literal[True] | None = None
    # packing: tokens a row. None: four times max_length. Longer rows pad less, and cost more attention where it is dense
    pack_length: PositiveInt | None = None

    @model_validator(mode="after")
    def _rows_hold_any_conversation(self) -> Self:
        if self.pack_length is not None and self.packing is None:
            raise ValueError("pack_length is for packed rows: set packing to true, or pack_length to null")
        if self.pack_length is not None and self.pack_length < self.max_length:
            raise ValueError(
                f"pack_length must be at least max_length, or a conversation would not fit into a row, got {self.pack_length} "
                f"and {self.max_length}"
            )
        return self

    @property
    def row_length(self) -> int | None:
        """Tokens that a packed row has room for; None where rows are not packed."""
        return (self.pack_length or 4 * self.max_length) if self.packing else None


class ScheduleConfig(Settings):
    """Batches, length and intervals of a training run; intervals are in optimiser steps."""

    # Conversations (data.packing: rows of them) a process and micro-step. Where a step has several micro-batches over all
    # processes, that is their mean: those of longer conversations have fewer, so that all take about as long
    batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt = 1  # micro-batches of an optimiser step, in each process
    # Micro-batches of an optimiser step over all processes, in place of gradient_accumulation_steps, which then follows from
    # their number: for runs that lose and gain processes. A multiple of each number that there may be
    micro_batches_per_step: PositiveInt | None = None
    epochs: PositiveInt = 1  # passes over the training data
    max_steps: PositiveInt | None = None  # in place of epochs, fewer steps or more
    mixed_precision: Literal["no", "bf16", "fp16"] = "bf16"  # dtype of matrix products in training; no: the weights'
    # Each layer of the draft keeps its input alone for the backward, and runs again in it: less memory, slower steps.
    activation_checkpointing: Literal[True] | None = None
    log_every_steps: PositiveInt = 10  # steps between log lines
    eval_every_steps: PositiveInt | None = None  # None: only at the end
    checkpoint_every_steps: PositiveInt | None = None  # None: only at the end
    keep_checkpoints: PositiveInt = 2  # the newest; that of the best step stays as well
    process_timeout_seconds: PositiveInt = 600  # how long several processes wait for one of them
    evaluation_timeout_seconds: PositiveInt = 14_400  # how long they wait for the one that decodes held-out prompts longest
    resume: bool = True  # go on from the newest checkpoint in the output folder
    resume_anyway: bool = False  # ... also where settings or data have changed that decide the weights
    # Where metrics are shown, beside metrics.jsonl.
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = ["tensorboard"]
    # Peak of a process's device in this precision, in 10^12 operations a second; model_flop_utilization is a share of it.
    # None: the data sheet's for some GPUs; for other devices no utilisation is reported
    peak_tflops: PositiveFloat | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # numpy, which is seeded as well, takes no larger one

    @model_validator(mode="after")
    def _micro_batches_are_counted_once(self) -> Self:
        if self.micro_batches_per_step is not None and self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"micro_batches_per_step {self.micro_batches_per_step} and gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} both say how many micro-batches a step has: give one of them"
            )
        return self


class HeldOutDecodingConfig(Settings):
    """The decoder run on held-out prompts during training; the best checkpoint is chosen by its tokens per target step."""

    num_prompts: PositiveInt = 8  # of the held-out conversations
    decode: DecodeConfig = DecodeConfig(max_new_tokens=48)

    @model_validator(mode="after")
    def _acceptance_is_that_of_a_lossless_rule(self) -> Self:
        if self.decode.lossy is not None:
            raise ValueError("decode.lossy must be null: a lossy rule keeps drafts that the target would not have written")
        if self.decode.tree is not None and self.decode.tree.kind == "fastest":
            raise ValueError("decode.tree fastest is found by eval/run.py: give its paths in a tree of kind static, or null")
        return self


def check_served(target: TargetConfig, held_out: HeldOutDecodingConfig) -> None:
    """Refuse what cannot be had of a target that servers run."""
    if target.states is not None and held_out.decode.tree is not None:
        raise ValueError(
            "held_out.decode.tree: target.states gives the states of texts, and drafts of a tree are none; set it to null"
        )


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

    @model_validator(mode="after")
    def _servers_read_what_is_decoded(self) -> Self:
        check_served(self.target, self.held_out)
        return self

    @model_validator(mode="after")
    def _loss_and_cache_can_follow_the_policy(self) -> Self:
        if not self.policy.on_policy:
            return self
        wrong = {
            "loss: cross_entropy would take the draft's own tokens for labels; give another divergence": (
                "cross_entropy" in self.loss.weights
            ),
            "data.packing must be null: a row has to be one conversation": self.data.packing is not None,
            "data.cache must be null: no cache holds what the draft writes": self.data.cache is not None,
        }
        for objection, applies in wrong.items():
            if applies:
                raise ValueError(f"{objection}, or set policy.on_policy to null")
        return self


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
    # An artifact of the same family and sizes, whose weights and draft vocabulary the head starts from; None: new weights.
    # A draft LM starts from one by student.init model and student.path
    init: str | None = None
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    held_out: HeldOutDecodingConfig = HeldOutDecodingConfig()
    sanity: SanityConfig = SanityConfig()
    num_speculative_tokens: PositiveInt = 3  # written into the artifact as its default
    output: str = "runs/heads"  # folder of artifact, checkpoints and metrics

    @model_validator(mode="after")
    def _servers_read_what_is_decoded(self) -> Self:
        check_served(self.target, self.held_out)
        return self

    @model_validator(mode="after")
    def _the_head_can_draft_that_many(self) -> Self:
        longest = self.head.longest_draft
        for where, wanted in (
            ("num_speculative_tokens", self.num_speculative_tokens),
            ("held_out.decode.num_speculative_tokens", self.held_out.decode.num_speculative_tokens),
        ):
            if longest is not None and wanted > longest:
                raise ValueError(
                    f"{where} must be at most {longest}, what a {self.head.kind} head of this size can draft, got {wanted}; "
                    "ask for fewer, or change head"
                )
        return self

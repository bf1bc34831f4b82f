"""Every command's config, typed and checked: what a YAML file and `--set` may say.

One frozen model a concern (`configs.settings`). Here are data and training; how a draft learns is in `configs.learning`, target
and decoding in `configs.decoding`, evaluation and gate in `configs.evaluating`, a sweep in `configs.sweep`.
Unknown keys, wrong types and values out of range are refused (`configs.loading` turns pydantic's findings into one sentence
each). `None` means off. Paths are strings, relative to the working directory. None of these modules imports torch, so that a
typo is reported in milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.decoding import DecodeConfig, SamplingConfig, TargetConfig
from configs.head_families import Eagle3Settings, HeadConfig
from configs.learning import LossConfig, OptimizerConfig, StudentConfig
from configs.policy import PolicyConfig
from configs.server import AnswerServerConfig, ServerConfig
from configs.settings import Dtype, NonNegativeInt, PositiveFloat, PositiveInt, Settings, Share

# --- data ---------------------------------------------------------------------------------------------------------


class PromptsConfig(Settings):
    """Where prompts come from: the target itself, a JSONL file, or a `datasets` data set."""

    source: Literal["self_seeded", "file", "dataset"] = "self_seeded"
    num_prompts: PositiveInt = 500
    path: str | None = None  # file: JSONL with `turns` or `messages`; dataset: a Hub id or a local folder
    subset: str | None = None  # dataset: configuration name
    split: str = "train"  # dataset
    field: str = "prompt"  # dataset: the column with the prompt (text, or chat messages)
    category: str = "self_seeded"  # given to prompts that bring none
    max_prompt_tokens: PositiveInt = 96  # self_seeded: a turn that has not ended by then is thrown away
    temperature: PositiveFloat = 1.0  # self_seeded
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95  # self_seeded

    @model_validator(mode="after")
    def _path_goes_with_source(self) -> Self:
        if (self.source == "self_seeded") == (self.path is not None):
            raise ValueError("path is needed for source 'file' and 'dataset', and only there")
        return self


class AnswersConfig(SamplingConfig):
    """Who writes the answers, and how the target does."""

    # dataset: the assistant message that a prompt's chat ends with is kept, as text from a writer other than the target
    # server: the target, run by the server that `server` describes
    written_by: Literal["target", "server", "dataset"] = "target"
    max_new_tokens: PositiveInt = 128  # longer answers are cut off
    batch_size: PositiveInt = 32  # of the local target


class DataConfig(Settings):
    """`scripts/make_data.py`: prompts, answered by the target, split into train and held-out."""

    target: TargetConfig = TargetConfig()
    prompts: PromptsConfig = PromptsConfig()
    answers: AnswersConfig = AnswersConfig()
    server: AnswerServerConfig | None = None  # answers.written_by server; self-seeded prompts are then its own too
    held_out_share: Share = 0.1  # decided by a hash of the prompt, so that it never moves between runs
    seed: NonNegativeInt = 0
    output: str = "runs/data"  # folder: train.jsonl, held_out.jsonl, manifest.json

    @model_validator(mode="after")
    def _answers_come_with_prompts(self) -> Self:
        if self.answers.written_by == "dataset" and self.prompts.source == "self_seeded":
            raise ValueError(
                "answers.written_by 'dataset' needs prompts that bring answers, and prompts.source 'self_seeded' brings none: "
                "give source 'file' or 'dataset'"
            )
        return self

    @model_validator(mode="after")
    def _servers_are_asked_for_answers(self) -> Self:
        if (self.answers.written_by == "server") != (self.server is not None):
            raise ValueError(
                "answers.written_by 'server' and a section server (url, model) go together: "
                f"got written_by '{self.answers.written_by}' {'without' if self.server is None else 'with'} a server"
            )
        if self.server is not None and self.server.answers_as == "text" and self.prompts.source == "self_seeded":
            raise ValueError(
                "server.answers_as 'text' cannot write self-seeded prompts, whose end only token ids show: give "
                "prompts.source 'file' or 'dataset', or a server that answers with token ids"
            )
        return self


class CacheConfig(Settings):
    """`scripts/make_cache.py`: what the target says about training conversations, computed once and kept."""

    target: TargetConfig = TargetConfig()
    data: str = "runs/data/train.jsonl"
    max_length: PositiveInt = 512  # tokens; longer conversations are cut at the end. Training may cut shorter, not longer
    kind: Literal["last_hidden", "top_k"] = "last_hidden"  # top_k is smaller and only approximates the law
    k: PositiveInt = 32  # top_k: how many of the likeliest tokens are kept at each position
    # last_hidden, for heads: the states after these blocks too (h_0 is the embedding output), all at every position and not
    # only before labels. [] for heads that read the final state alone; None: a cache for distillation
    taps: list[NonNegativeInt] | None = None
    dtype: Dtype | None = None  # None: bfloat16 for hidden states, float16 for log-probabilities
    batch_size: PositiveInt = 8
    chunk_size: PositiveInt = 128  # top_k, taps: positions whose logits live at one time
    shard_megabytes: PositiveFloat = 64.0  # size of a file; a cut-off run loses the files under way
    server: ServerConfig | None = None  # top_k: asked instead of the local target, which then only checks the server
    output: str = "runs/cache"  # folder: manifest.json, shard-00000.safetensors, ...

    @model_validator(mode="after")
    def _servers_give_log_probabilities_only(self) -> Self:
        if self.server is not None and self.kind != "top_k":
            raise ValueError(f"kind must be top_k with a server, which hands out no hidden states, got {self.kind}")
        return self

    @model_validator(mode="after")
    def _taps_are_hidden_states(self) -> Self:
        if self.taps is not None and self.kind != "last_hidden":
            raise ValueError(f"kind must be last_hidden with taps, got {self.kind}")
        if self.taps is not None and sorted(set(self.taps)) != self.taps:
            raise ValueError(f"taps must rise and name each state once, got {self.taps}")
        return self


# --- distillation -------------------------------------------------------------------------------------------------


class TrainingDataConfig(Settings):
    """Conversations written by `scripts/make_data.py`."""

    train: str = "runs/data/train.jsonl"
    held_out: str = "runs/data/held_out.jsonl"
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


class ProfileConfig(Settings):
    """Steps recorded by torch's profiler, into OUTPUT/profile."""

    start_step: PositiveInt = 5  # from 1; the first steps are unlike the others
    num_steps: PositiveInt = 3


class ScheduleConfig(Settings):
    """Lengths and rhythms of a training run, in optimiser steps unless said otherwise."""

    batch_size: PositiveInt = 8  # conversations (data.packing: rows of them) a process and micro-step
    gradient_accumulation_steps: PositiveInt = 1
    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None  # in place of epochs, fewer steps or more
    mixed_precision: Literal["no", "bf16", "fp16"] = "bf16"
    log_every_steps: PositiveInt = 10
    eval_every_steps: PositiveInt | None = None  # None: only at the end
    checkpoint_every_steps: PositiveInt | None = None  # None: only at the end
    keep_checkpoints: PositiveInt = 2  # the newest; that of the best step stays as well
    process_timeout_seconds: PositiveInt = 600  # one of several processes that others wait for longer than this is given up
    loader_workers: PositiveInt | None = None  # processes that make batches ahead; None: made by training itself, when due
    resume: bool = True  # go on from the newest checkpoint in the output folder
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = ["tensorboard"]
    profile: ProfileConfig | None = None
    # What a device of one process can do at most in this precision, in 10^12 operations a second; model_flop_utilization is a
    # share of it. None: what a matrix product is seen to reach when the run starts
    peak_tflops: PositiveFloat | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # numpy, which is seeded as well, takes no larger one


class HeldOutDecodingConfig(Settings):
    """The decoder run on held-out prompts during training; the best checkpoint is chosen by its tokens per target step."""

    num_prompts: PositiveInt = 8
    decode: DecodeConfig = DecodeConfig(max_new_tokens=48)

    @model_validator(mode="after")
    def _acceptance_is_that_of_a_lossless_rule(self) -> Self:
        if self.decode.lossy is not None:
            raise ValueError("decode.lossy must be null: a lossy rule keeps drafts that the target would not have written")
        return self


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
    output: str = "runs/distill"

    @model_validator(mode="after")
    def _loss_and_cache_can_follow_the_policy(self) -> Self:
        if not self.policy.rewrites:
            return self
        if "cross_entropy" in self.loss.weights:
            raise ValueError(
                "a phase of policy lets the draft write answers, and cross_entropy would take its tokens for labels: give loss "
                "another divergence, or take on_policy and draft_states out of policy.phases"
            )
        if self.data.packing:
            raise ValueError(
                "a phase of policy lets the draft write answers anew, for which a row has to be one conversation: set "
                "data.packing to null, or take on_policy and draft_states out of policy.phases"
            )
        if self.data.cache is not None:
            raise ValueError(
                "a phase of policy lets the draft write answers, which no cache knows: set data.cache to null, or take "
                "on_policy and draft_states out of policy.phases"
            )
        return self


# --- heads --------------------------------------------------------------------------------------------------------


class SanityConfig(Settings):
    """Gates before a head is trained: an artifact written and read back, one conversation learnt by heart."""

    enabled: bool = True
    overfit_steps: PositiveInt = 100  # at most; it is enough when the decoder accepts a whole block
    learning_rate: PositiveFloat = 3e-3


class HeadsConfig(Settings):
    """`train/heads.py`: train a head on the frozen target."""

    target: TargetConfig = TargetConfig()
    data: TrainingDataConfig = TrainingDataConfig()
    head: HeadConfig = Eagle3Settings(kind="eagle3")
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    held_out: HeldOutDecodingConfig = HeldOutDecodingConfig()
    sanity: SanityConfig = SanityConfig()
    num_speculative_tokens: PositiveInt = 3  # written into the artifact as its default
    output: str = "runs/heads"

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


class StitchConfig(Settings):
    """`scripts/stitch_mtp.py`: put trained MTP modules into a copy of the target they were trained for."""

    allow_target_mismatch: bool = False  # the folder's weights may be others than those of the target trained for

"""Every setting of every command, typed and checked.

One frozen model a concern; a command's config is made of them. Unknown keys, wrong types and values out of range are
refused (`configs.loading` turns pydantic's findings into one sentence each). `None` means off. Paths are strings,
relative to the working directory. This module imports no torch, so that a typo is reported in milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["bfloat16", "float16", "float32"]


class Settings(BaseModel):
    """Common behaviour: immutable, strict types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TargetConfig(Settings):
    """The language model that is to become faster."""

    name: str = "embedded:smollm2-135m-instruct"  # or a Hub id, a local folder, a .gguf file
    revision: str | None = None  # a Hub revision; only for Hub ids
    dtype: Dtype = "bfloat16"
    attention: Literal["sdpa", "eager"] = "sdpa"
    device: str = "auto"  # auto takes the GPU where there is one
    trust_remote_code: bool = False


class SamplingConfig(Settings):
    """How tokens are chosen from logits: temperature, then top-k, then top-p. Temperature 0 is greedy."""

    temperature: NonNegativeFloat = 0.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None


class DecodeConfig(SamplingConfig):
    """One way of decoding. `num_speculative_tokens: 0` is plain decoding through the same loop."""

    num_speculative_tokens: NonNegativeInt = 3
    verification: Literal["token", "block", "match"] = "token"  # at temperature 0 all three are the greedy rule
    max_new_tokens: PositiveInt = 128
    batch_size: PositiveInt = 1
    seed: NonNegativeInt = 0


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
    """How the target writes the answers."""

    max_new_tokens: PositiveInt = 128
    batch_size: PositiveInt = 32


class DataConfig(Settings):
    """`scripts/make_data.py`: prompts, answered by the target, split into train and held-out."""

    target: TargetConfig = TargetConfig()
    prompts: PromptsConfig = PromptsConfig()
    answers: AnswersConfig = AnswersConfig()
    held_out_share: Share = 0.1  # decided by a hash of the prompt, so that it never moves between runs
    seed: NonNegativeInt = 0
    output: str = "runs/data"  # folder: train.jsonl, held_out.jsonl, manifest.json


# --- distillation -------------------------------------------------------------------------------------------------


def _default_layers(student: dict[str, Any]) -> list[int] | None:
    """Keep the first two and the last two of the embedded target's 30 blocks, where the student is made of the target's."""
    return [0, 1, 28, 29] if student.get("init") == "target_layers" else None


class StudentConfig(Settings):
    """The draft before training: the target with layers kept, any smaller model, or a fresh one."""

    init: Literal["target_layers", "model", "config"] = "target_layers"
    # target_layers: which blocks of the target are kept, in order
    layers: list[NonNegativeInt] | None = Field(default_factory=_default_layers)
    path: str | None = None  # model: folder or Hub id; config: folder with a config.json
    train_embeddings: bool = False  # a tied embedding is the largest part of a small draft; frozen by default

    @model_validator(mode="after")
    def _fields_go_with_init(self) -> Self:
        if (self.init == "target_layers") != (self.layers is not None):
            raise ValueError("layers is needed for init 'target_layers', and only there")
        if (self.init == "target_layers") == (self.path is not None):
            raise ValueError("path is needed for init 'model' and 'config', and only there")
        if self.layers is not None and sorted(set(self.layers)) != self.layers:
            raise ValueError(f"layers must rise and name each block once, got {self.layers}")
        if self.layers == []:
            raise ValueError("layers must keep at least one block")
        return self


class LossConfig(Settings):
    """The divergence between the target's and the draft's distribution of the next token."""

    divergence: Literal["forward_kl"] = "forward_kl"
    temperature: PositiveFloat = 1.0
    chunk_size: PositiveInt = 128  # positions whose logits live at one time


class OptimizerConfig(Settings):
    """AdamW with linear warm-up and a cosine to `final_share` of the learning rate."""

    learning_rate: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    beta1: Share = 0.9
    beta2: Share = 0.95
    max_grad_norm: PositiveFloat = 1.0
    warmup_share: Share = 0.05
    final_share: Share = 0.1


class TrainingDataConfig(Settings):
    """Conversations written by `scripts/make_data.py`."""

    train: str = "runs/data/train.jsonl"
    held_out: str = "runs/data/held_out.jsonl"
    max_length: PositiveInt = 512  # tokens; longer conversations are cut at the end


class ScheduleConfig(Settings):
    """Lengths and rhythms of a training run, in optimiser steps unless said otherwise."""

    batch_size: PositiveInt = 8  # conversations a process and micro-step
    gradient_accumulation_steps: PositiveInt = 1
    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    mixed_precision: Literal["no", "bf16", "fp16"] = "bf16"
    log_every_steps: PositiveInt = 10
    eval_every_steps: PositiveInt | None = None  # None: only at the end
    checkpoint_every_steps: PositiveInt | None = None  # None: only at the end
    keep_checkpoints: PositiveInt = 2
    resume: bool = True  # go on from the newest checkpoint in the output folder
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = ["tensorboard"]
    seed: NonNegativeInt = 0


class HeldOutDecodingConfig(Settings):
    """The decoder run on held-out prompts during training; the best checkpoint is chosen by its tokens per target step."""

    num_prompts: PositiveInt = 8
    decode: DecodeConfig = DecodeConfig(max_new_tokens=48)


class DistillConfig(Settings):
    """`train/distill.py`: distil the target into a small draft model."""

    target: TargetConfig = TargetConfig()
    data: TrainingDataConfig = TrainingDataConfig()
    student: StudentConfig = StudentConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    held_out: HeldOutDecodingConfig = HeldOutDecodingConfig()
    num_speculative_tokens: PositiveInt = 3  # written into the artifact as its default
    output: str = "runs/distill"


# --- evaluation and gate ------------------------------------------------------------------------------------------


class SuiteConfig(Settings):
    """Prompts to evaluate on."""

    path: str = "eval/suites/house64.jsonl"
    num_prompts: PositiveInt | None = None  # None: all; otherwise spread evenly over the categories


class LosslessConfig(Settings):
    """When a difference from plain decoding counts as a numerical tie."""

    tie_ulps: NonNegativeFloat = (
        4.0  # largest gap between the two tokens' logits, in units in the last place of the target's dtype
    )
    check_float32_prompts: NonNegativeInt = 2  # prompts decoded once more in float32, where both runs must be equal


class EvalConfig(Settings):
    """`eval/run.py`: decode with a draft, compare with plain decoding, write the report."""

    target: TargetConfig = TargetConfig()
    draft: str = "runs/distill/artifact"  # an artifact folder
    allow_target_mismatch: bool = False
    suite: SuiteConfig = SuiteConfig()
    decode: DecodeConfig = DecodeConfig()
    repeats: PositiveInt = 2  # interleaved: plain, speculative, baselines, plain, ...
    warmup_prompts: NonNegativeInt = 1
    baselines: list[Literal["prompt_lookup"]] = ["prompt_lookup"]
    lossless: LosslessConfig = LosslessConfig()
    bootstrap_samples: PositiveInt = 2000
    output: str = "runs/eval"  # folder: report.json, report.html, report.md, records.jsonl


class GateRule(Settings):
    """One threshold on one number of the report, named by its dotted path, e.g. `acceptance.tokens_per_target_step`."""

    metric: str
    min: float | None = None
    max: float | None = None
    bound: Literal["point", "confidence"] = "confidence"  # confidence: the interval must clear the threshold
    relative_to_baseline: bool = False  # the threshold is a ratio to the same metric in the baseline report

    @model_validator(mode="after")
    def _has_a_threshold(self) -> Self:
        if (self.min is None) == (self.max is None):
            raise ValueError("give exactly one of min and max")
        return self


class GateConfig(Settings):
    """`eval/gate.py`: what a report must show before its draft may be released."""

    rules: list[GateRule] = []
    lossless: list[Literal["lossless", "lossless_up_to_ties", "lossy_by_design"]] = ["lossless", "lossless_up_to_ties"]
    min_prompts: PositiveInt = 1

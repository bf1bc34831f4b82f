"""Every command's config, typed and checked: what a YAML file and `--set` may say.

One frozen model a concern (`configs.settings`); how a draft learns is in `configs.learning`. Unknown keys, wrong types and
values out of range are refused (`configs.loading` turns pydantic's findings into one sentence each). `None` means off. Paths
are strings, relative to the working directory. This module imports no torch, so that a typo is reported in milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.learning import LossConfig, OptimizerConfig, StudentConfig
from configs.settings import Dtype, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings, Share


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


class CacheConfig(Settings):
    """`scripts/make_cache.py`: what the target says about training conversations, computed once and kept."""

    target: TargetConfig = TargetConfig()
    data: str = "runs/data/train.jsonl"
    max_length: PositiveInt = 512  # tokens; longer conversations are cut at the end. Training may cut shorter, not longer
    kind: Literal["last_hidden", "top_k"] = "last_hidden"  # top_k is smaller and only approximates the law
    k: PositiveInt = 32  # top_k: how many of the likeliest tokens are kept at each position
    dtype: Dtype | None = None  # None: bfloat16 for hidden states, float16 for log-probabilities
    batch_size: PositiveInt = 8
    chunk_size: PositiveInt = 128  # top_k: positions whose logits live at one time
    shard_megabytes: PositiveFloat = 64.0  # size of a file; a cut-off run loses the files under way
    output: str = "runs/cache"  # folder: manifest.json, shard-00000.safetensors, ...


# --- distillation -------------------------------------------------------------------------------------------------


class TrainingDataConfig(Settings):
    """Conversations written by `scripts/make_data.py`."""

    train: str = "runs/data/train.jsonl"
    held_out: str = "runs/data/held_out.jsonl"
    max_length: PositiveInt = 512  # tokens; longer conversations are cut at the end
    cache: str | None = None  # a folder made of `train` by `scripts/make_cache.py`; None: the target runs on every batch


class ScheduleConfig(Settings):
    """Lengths and rhythms of a training run, in optimiser steps unless said otherwise."""

    batch_size: PositiveInt = 8  # conversations a process and micro-step
    gradient_accumulation_steps: PositiveInt = 1
    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None  # in place of epochs, fewer steps or more
    mixed_precision: Literal["no", "bf16", "fp16"] = "bf16"
    log_every_steps: PositiveInt = 10
    eval_every_steps: PositiveInt | None = None  # None: only at the end
    checkpoint_every_steps: PositiveInt | None = None  # None: only at the end
    keep_checkpoints: PositiveInt = 2
    resume: bool = True  # go on from the newest checkpoint in the output folder
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = ["tensorboard"]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # numpy, which is seeded as well, takes no larger one


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

    # Largest gap between the two tokens' logits, in multiples of the rounding error measured at that position: either token
    # may be off by one error. On SmolLM2 in bf16 the largest gap seen among 51 differences was 1.2 errors.
    tie_noise: NonNegativeFloat = 2.0
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


# --- benchmarks ---------------------------------------------------------------------------------------------------


class BenchDecodeConfig(Settings):
    """`scripts/bench_decode.py`: the decoder beside transformers' own generation, on the same prompts and in turns."""

    target: TargetConfig = TargetConfig()
    draft: str = "runs/demo/distill/artifact"  # the artifact of a draft LM
    suite: SuiteConfig = SuiteConfig(num_prompts=24)
    num_speculative_tokens: PositiveInt = 3
    max_new_tokens: PositiveInt = 32
    repeats: PositiveInt = 2  # timed runs of every side on every prompt; sampled runs take another seed each time
    bootstrap_samples: PositiveInt = 2000
    output: str = "docs/results/decode.json"


class BenchLossConfig(Settings):
    """The loss part of `scripts/bench_distill.py`: forward and backward over random hidden states and frozen heads."""

    vocab_size: PositiveInt = 151_936  # rows of both heads
    width: PositiveInt = 576  # of both sides' hidden states
    chunk_size: PositiveInt = 128  # positions whose logits live at one time in our loss
    memory_positions: PositiveInt = 4096  # halved until the unchunked loss fits into max_gibibytes and the free memory
    memory_repeats: PositiveInt = 2  # processes by side
    time_positions: PositiveInt = 512  # halved likewise
    time_repeats: PositiveInt = 6
    max_gibibytes: PositiveFloat = 16.0  # most memory that the unchunked loss may take


class BenchDistillConfig(Settings):
    """`scripts/bench_distill.py`: the loss's memory and time, training from a cache, a draft before and after training."""

    draft: str = "runs/demo/distill/artifact"  # a distilled draft LM; its target, data and recipe are what is measured
    loss: BenchLossConfig = BenchLossConfig()
    num_batches: PositiveInt = 12  # timed optimiser steps by side
    trl_batch_size: PositiveInt = 4  # conversations a batch beside TRL's trainer, where that is installed
    num_prompts: PositiveInt = 24  # held-out conversations decoded for tau, the last of the file: the first chose the draft
    max_new_tokens: PositiveInt = 48
    bootstrap_samples: PositiveInt = 2000
    output: str = "docs/results/distill.json"


class ResultsTableConfig(Settings):
    """`scripts/results_table.py`: the tables of a document, made from the files of the benchmarks."""

    document: str = "README.md"
    results: str = "docs/results"  # folder with NAME.json for each `<!-- table: NAME -->`

"""Every setting of every command, typed and checked.

One frozen model a concern; a command's config is made of them. Unknown keys, wrong types and values out of range are
refused (`configs.loading` turns pydantic's findings into one sentence each). `None` means off. Paths are strings,
relative to the working directory. This module imports no torch, so that a typo is reported in milliseconds.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, Self, get_args

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


class LoraSettings(Settings):
    """Low-rank adapters on the initial draft, trained in place of its weights and merged into them in the artifact."""

    rank: PositiveInt = 16
    alpha: PositiveInt = 32  # the adapters' output is scaled by alpha / rank
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: list[str] | None = None  # names of linear layers, e.g. [q_proj, v_proj]; None: all but the head


def _default_layers(student: dict[str, Any]) -> list[int] | None:
    """Keep the first two and the last two of the embedded target's 30 blocks, where nothing else is said."""
    return [0, 1, 28, 29] if student.get("init") == "target_layers" and student.get("layer_choice") is None else None


class StudentConfig(Settings):
    """The draft before training: the target with layers kept, any smaller model, or a fresh one."""

    init: Literal["target_layers", "model", "config", "fresh"] = "target_layers"
    # target_layers: how the kept blocks are chosen, and how many; or a list of them, in order
    layer_choice: Literal["first", "last", "spread", "searched"] | None = None
    num_layers: PositiveInt | None = None
    search_trials: PositiveInt = 32  # searched: drafts tried, each a forward over the calibration conversations
    search_conversations: PositiveInt = 16  # searched: training conversations that acceptance is measured on
    layers: list[NonNegativeInt] | None = Field(default_factory=_default_layers)
    path: str | None = None  # model: folder or Hub id; config: folder with a config.json
    # fresh: what differs from the target's own config, e.g. {num_hidden_layers: 4, hidden_size: 256}
    overrides: dict[str, bool | int | float | str] | None = None
    # A tied embedding is the largest part of a small draft: frozen by default, unless random (config, fresh).
    train_embeddings: bool = False
    draft_vocab_size: PositiveInt | None = None  # the draft says only so many tokens, the answers' most frequent; None: all
    lora: LoraSettings | None = None  # None: train the weights themselves

    @model_validator(mode="after")
    def _fields_go_with_init(self) -> Self:
        ways = [way for way in (self.layers, self.layer_choice) if way is not None]
        if len(ways) != (self.init == "target_layers"):
            raise ValueError(
                "one of layers and layer_choice (the other null) is needed for init 'target_layers', and only there"
            )
        if (self.layer_choice is None) != (self.num_layers is None):
            raise ValueError("num_layers is needed for a layer_choice, and only there")
        if (self.init in ("model", "config")) != (self.path is not None):
            raise ValueError("path is needed for init 'model' and 'config', and only there")
        if (self.init == "fresh") != (self.overrides is not None):
            raise ValueError("overrides is needed for init 'fresh', and only there")
        if self.lora is not None and self.init in ("config", "fresh"):
            raise ValueError(f"lora adapts weights that mean something; init {self.init!r} makes random ones")
        return self

    @model_validator(mode="after")
    def _layers_rise(self) -> Self:
        if self.layers is not None and sorted(set(self.layers)) != self.layers:
            raise ValueError(f"layers must rise and name each block once, got {self.layers}")
        if self.layers == []:
            raise ValueError("layers must keep at least one block")
        return self


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


def _default_divergence(loss: dict[str, Any]) -> DivergenceName | None:
    return None if loss.get("mix") is not None else "forward_kl"


class LossConfig(Settings):
    """The divergence between the target's and the draft's distribution of the next token: a single one, or a mix."""

    mix: dict[str, NonNegativeFloat] | None = None  # weight by name, used as given, e.g. {forward_kl: 1.0, cross_entropy: 0.1}
    divergence: DivergenceName | None = Field(default_factory=_default_divergence)
    settings: DivergenceSettings = DivergenceSettings()
    temperature: PositiveFloat = 1.0  # divides both sides' logits; cross-entropy stays at 1
    chunk_size: PositiveInt = 128  # positions whose logits live at one time

    @model_validator(mode="after")
    def _one_divergence_or_a_mix(self) -> Self:
        known = get_args(DivergenceName)
        for name in self.mix or {}:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise ValueError(f"mix has the unknown divergence {name!r}; the nearest known one is {nearest!r}")
        if self.mix is not None and not any(self.mix.values()):
            raise ValueError(f"at least one weight of mix must be above 0, got {self.mix}")
        if (self.divergence is None) == (self.mix is None):
            raise ValueError("give divergence or mix, and null for the other one")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each divergence in use."""
        single = {} if self.divergence is None else {str(self.divergence): 1.0}
        return single if self.mix is None else {name: weight for name, weight in self.mix.items() if weight}


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
    cache: str | None = None  # a folder made of `train` by `scripts/make_cache.py`; None: the target runs on every batch


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


class ResultsTableConfig(Settings):
    """`scripts/results_table.py`: the tables of a document, made from the files of the benchmarks."""

    document: str = "README.md"
    results: str = "docs/results"  # folder with NAME.json for each `<!-- table: NAME -->`

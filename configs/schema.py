"""Every command's config, typed and checked: what a YAML file and `--set` may say.

One frozen model a concern (`configs.settings`); how a draft learns is in `configs.learning`, a sweep in `configs.sweep`.
Unknown keys, wrong types and values out of range are refused (`configs.loading` turns pydantic's findings into one sentence
each). `None` means off. Paths are strings, relative to the working directory. This module imports no torch, so that a typo is
reported in milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from configs.costs import CostConfig
from configs.head_families import Eagle3Settings, HeadConfig
from configs.learning import LossConfig, OptimizerConfig, StudentConfig
from configs.lossy import LossyConfig
from configs.policy import PolicyConfig
from configs.quality import QualityConfig, refuse_unjudged_loss
from configs.rules import Rule, Verification, check_lossy, check_tree_rule, draws_drafts, rule_of
from configs.settings import Dtype, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings, Share
from configs.stopping import CostStopping, StoppingConfig
from configs.trees import TreeConfig


class TargetConfig(Settings):
    """The language model that is to become faster."""

    name: str = "embedded:smollm2-135m-instruct"  # or a Hub id, a local folder, a .gguf file
    revision: str | None = None  # a Hub revision; only for Hub ids
    dtype: Dtype = "bfloat16"
    attention: Literal["sdpa", "eager"] = "sdpa"
    # lean: decode by a forward of draftsmith's own (Llama, Mistral, Qwen2, Qwen3), which packs the weights a second time in the
    # form that a CPU reads fastest. The draft then runs by one too, where it is of such a family.
    # compiled: that forward, or transformers' for other families, by torch.compile for fixed shapes: faster by a little after
    # half a minute or more for each shape, so for long runs. The draft runs the same way.
    forward: Literal["transformers", "lean", "compiled"] = "transformers"
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
    stopping: StoppingConfig = None  # when a round drafts fewer; None: never by choice
    # At temperature 0 all three are the greedy rule. None: block for chains; for trees token, or match where nothing is drawn
    verification: Verification | None = None
    max_new_tokens: PositiveInt = 128
    batch_size: PositiveInt = 1
    seed: NonNegativeInt = 0
    # Strings in the answer's text that end it with the token that completes the first of them; None: only ends of text do.
    stop: list[str] | None = None
    # int8: the target keeps keys and values in 8 bits, for half the memory; None: in its dtype. It changes the target's law a
    # little, for plain decoding as for speculative; the draft's cache stays as it is.
    kv_cache: Literal["int8"] | None = None
    # Several candidates for each position, down to num_speculative_tokens; None: a chain. At a temperature above 0, `token`
    # judges siblings as `tree.candidates` says, `match` takes the draft's likeliest, as a dynamic tree always does.
    tree: TreeConfig = None
    # Above temperature 0: give up the target's law for speed; needs the quality measured beside it. None: lossless
    lossy: LossyConfig = None

    @property
    def rule(self) -> Rule:
        """The verification rule that these settings come to."""
        return rule_of(self)

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn from the draft's law; else they are its likeliest tokens."""
        return draws_drafts(self)

    @model_validator(mode="after")
    def _the_tree_can_be_drafted_and_judged(self) -> Self:
        if self.tree is None or self.num_speculative_tokens == 0:
            return self
        if self.tree.kind == "static" and self.tree.depth > self.num_speculative_tokens:
            raise ValueError(
                f"tree is {self.tree.depth} tokens deep, and num_speculative_tokens allows {self.num_speculative_tokens}; "
                "raise that, or cut the tree"
            )
        if self.stopping is not None:
            raise ValueError("stopping cuts chains only: set it to null, or tree to null")
        check_tree_rule(self)
        return self

    @model_validator(mode="after")
    def _the_lossy_mode_goes_with_the_rest(self) -> Self:
        check_lossy(self)
        return self

    @model_validator(mode="after")
    def _stops_can_be_found(self) -> Self:
        if self.stop is None:
            return self
        if not self.stop or not all(self.stop):
            raise ValueError(f"stop must hold strings of one character or more, got {self.stop}; null is for none")
        if unknown := [stop for stop in self.stop if "\ufffd" in stop]:
            raise ValueError(f"stop: {unknown[0]!r} holds U+FFFD, as which every unfinished character is shown; leave it out")
        return self

    @model_validator(mode="after")
    def _costs_are_known_for_every_length(self) -> Self:
        if isinstance(self.stopping, CostStopping):
            known, needed = len(self.stopping.target_step_milliseconds), self.num_speculative_tokens + 1
            if known < needed:
                raise ValueError(
                    f"stopping.target_step_milliseconds must have {needed} entries or more, for 1 to {needed} rows "
                    f"(num_speculative_tokens + 1), got {known}"
                )
        return self


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
    written_by: Literal["target", "dataset"] = "target"
    max_new_tokens: PositiveInt = 128  # longer answers are cut off
    batch_size: PositiveInt = 32


class DataConfig(Settings):
    """`scripts/make_data.py`: prompts, answered by the target, split into train and held-out."""

    target: TargetConfig = TargetConfig()
    prompts: PromptsConfig = PromptsConfig()
    answers: AnswersConfig = AnswersConfig()
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


class ServerConfig(Settings):
    """A target on another machine, behind an OpenAI-compatible API that gives log-probabilities of a prompt by token id."""

    url: str  # of the API, such as http://host:8000/v1
    model: str  # what the server calls the target
    api_key_variable: str | None = None  # name of the environment variable that holds the key
    concurrency: PositiveInt = 8  # requests under way at one time, a process
    timeout_seconds: PositiveFloat = 120.0  # of one request
    retries: NonNegativeInt = 5  # further attempts after a failed connection, a timeout, 429 or 5xx
    # Nats: how far the log-probabilities of the server's likeliest tokens may lie from the target's, on average over a few
    # positions. SmolLM2 in vLLM was 0.01 to 0.03 off in bfloat16, rounded to 8 bits 0.03 to 0.07, to 4 bits 0.2 to 0.7.
    probe_tolerance: PositiveFloat = 0.1

    @model_validator(mode="after")
    def _url_is_plain(self) -> Self:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("url must be that of an API, such as http://host:8000/v1")
        # The url is written beside the cache; what is secret stays out of it, and out of this sentence.
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("url must hold no user, password or query; name the variable with the key in api_key_variable")
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


# --- evaluation and gate ------------------------------------------------------------------------------------------


class SuiteConfig(Settings):
    """Prompts to evaluate on: a JSONL file, or a `datasets` data set. `eval/suites/README.md` says what the formats are."""

    path: str = "eval/suites/house64.jsonl"  # a file; a data set's folder or Hub id (owner/name)
    format: Literal["auto", "turns", "messages", "humaneval", "gsm8k", "column"] = "auto"  # auto: told from the first row
    column: str | None = None  # format column: where the prompt stands, as a text, a list of turns or chat messages
    subset: str | None = None  # data set: configuration name
    split: str = "test"  # data set
    num_prompts: PositiveInt | None = None  # None: all; otherwise spread evenly over the categories
    max_turns: PositiveInt | None = None  # None: all; the report warns of those left out

    @model_validator(mode="after")
    def _column_goes_with_its_format(self) -> Self:
        if self.column is not None and self.format not in ("auto", "column"):
            raise ValueError(f"column is for format 'column' only, got format {self.format!r}: leave one of the two out")
        if self.column is None and self.format == "column":
            raise ValueError("column is needed with format 'column': name the one that holds the prompts")
        return self


class LosslessConfig(Settings):
    """When a difference from plain decoding counts as a numerical tie, and how samples are tested against the target's law."""

    # Largest gap between the two tokens' logits, in multiples of the rounding error measured at that position: either token
    # may be off by one error. On SmolLM2 in bf16 the largest gap seen among 51 differences was 1.2 errors.
    tie_noise: NonNegativeFloat = 2.0
    check_float32_prompts: NonNegativeInt = 2  # prompts decoded once more in float32, where both runs must be equal
    # At temperature > 0: how often a lossless decoder may fail the statistical tests. None: only the rule is proved.
    false_alarm_rate: Annotated[float, Field(gt=0, lt=1)] | None = 0.01
    # Samples of one text whose first tokens are counted; 0: that test is off. 10 s of one core with SmolLM2-135M.
    first_token_samples: NonNegativeInt = 512


FreeDraft = Literal["prompt_lookup", "suffix_lookup", "self_speculation"]  # ways of drafting that need no training


class EvalConfig(Settings):
    """`eval/run.py`: decode with a draft, compare with plain decoding, write the report."""

    target: TargetConfig = TargetConfig()
    # An artifact folder, or a list of them, whose candidates are merged into one tree in the order of the list
    draft: str | list[str] = "runs/distill/artifact"
    draft_device: str | None = None  # of draft LMs, such as cuda:1; None: the target's. Not yet run on two devices
    allow_target_mismatch: bool = False
    suite: SuiteConfig = SuiteConfig()
    decode: DecodeConfig = DecodeConfig()
    repeats: PositiveInt = 2  # interleaved: plain, speculative, baselines, plain, ...
    warmup_prompts: NonNegativeInt = 1
    baselines: list[FreeDraft] = ["prompt_lookup"]  # measured beside the draft (`eval.baselines`)
    self_speculation_layers: PositiveInt | None = None  # of the target's blocks, for that baseline; None: a quarter of them
    lossless: LosslessConfig = LosslessConfig()
    cost: CostConfig | None = None  # a timing sweep, from which the speed at other settings is predicted; None: no prediction
    quality: QualityConfig | None = None  # what answers are worth, with and without the draft; a lossy mode needs it
    energy: bool = False  # joules per token, by the machine's own counters where they can be read
    bootstrap_samples: PositiveInt = 2000
    previous_report: str | None = None  # of the draft before, shown beside this one on the page; the gate takes --baseline
    output: str = "runs/eval"  # folder: report.json, report.html, report.md, records.jsonl

    @model_validator(mode="after")
    def _lossy_answers_are_judged(self) -> Self:
        refuse_unjudged_loss(None if self.decode.lossy is None else self.decode.lossy.kind, self.quality)
        return self

    @property
    def drafts(self) -> list[str]:
        """The artifact folders that `draft` names."""
        return [self.draft] if isinstance(self.draft, str) else self.draft

    @field_validator("draft", mode="before")
    @classmethod
    def _draft_is_named_by_text(cls, value: Any) -> Any:
        """Say in one sentence what pydantic would say once for each form that a draft may have."""
        if not all(isinstance(each, str) for each in (value if isinstance(value, list) else [value])):
            raise ValueError(f"expected an artifact folder or a list of them, got {value!r}")
        return value

    @model_validator(mode="after")
    def _several_drafts_can_be_merged(self) -> Self:
        if not self.drafts:
            raise ValueError("draft names no artifact folder: give one, or a list of several")
        if len(set(self.drafts)) < len(self.drafts):
            raise ValueError(f"draft names the same folder twice, got {self.drafts}; a draft adds nothing to itself")
        if len(self.drafts) == 1:
            return self
        if self.decode.tree is None or self.decode.num_speculative_tokens == 0:
            raise ValueError(
                "several drafts are merged into a tree: set decode.tree, for instance to a static one with branching "
                "[1, 1, 1], and decode.num_speculative_tokens to at least its depth"
            )
        if self.decode.draws:
            raise ValueError(
                f"tokens of several drafts cannot be drawn from one law, as rule {self.decode.rule} asks for: set "
                "decode.verification to match, or decode.temperature to 0"
            )
        return self

    @model_validator(mode="after")
    def _baselines_are_named_once(self) -> Self:
        if len(set(self.baselines)) < len(self.baselines):
            raise ValueError(f"baselines must name each way once, got {self.baselines}")
        return self

    @model_validator(mode="after")
    def _costs_are_those_of_whole_chains(self) -> Self:
        if self.cost is not None and (self.decode.tree is not None or self.decode.stopping is not None):
            name = "tree" if self.decode.tree is not None else "stopping"
            raise ValueError(f"cost predicts chains of a fixed length only: set it to null, or decode.{name} to null")
        return self


class CompareConfig(Settings):
    """`eval/compare.py`: several reports side by side."""

    may_differ_in: list[Literal["target", "suite"]] = []  # what the reports are of; refused unless named here
    output: str = "runs/comparison.html"


class GateRule(Settings):
    """One threshold on one number of the report, named by its dotted path, e.g. `acceptance.tokens_per_target_step`.

    `by_category.*.acceptance.tokens_per_target_step` holds every category of the report to the same threshold.
    """

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
    # Ways to decode that need no training, measured in the same run: both tau and speed must lie above theirs
    must_beat: list[FreeDraft] = []
    suite_sha256: str | None = None  # what the report's prompts must hash to (its prompts.sha256)
    allow_target_mismatch: bool = False  # the draft may have been made for other weights than those it was measured with
    # What a baseline report may have been made with otherwise. Target and prompts are never in question.
    baseline_may_differ_in: list[Literal["num_speculative_tokens", "decode", "machine"]] = []

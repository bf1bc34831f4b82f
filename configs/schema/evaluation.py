"""The configs of `eval/run.py`, `eval/compare.py` and `eval/gate.py`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from configs.schema.base import (
    NonNegativeFloat,
    NonNegativeInt,
    Policy,
    PositiveFloat,
    PositiveInt,
    Settings,
    unless_once,
    unless_rising,
)
from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig

RELATIVE = ("acceptance.tokens_per_target_step", "speed.decode_speedup")  # of what a gate's rule may compare with a baseline


class QualityConfig(Settings):
    """Score plain and speculative answers to the same prompts, and compare them prompt by prompt."""

    perplexity: bool = True  # of the answers, under the target's own distribution at temperature 1
    # gsm8k: the last number of an answer equals that of the reference, which every prompt needs
    exact_match: Literal["gsm8k"] | None = None

    def objections(self) -> Iterator[str]:
        if not self.perplexity and self.exact_match is None:
            yield "quality judges nothing: turn perplexity on, or give exact_match; null turns it off"


class CostConfig(Settings):
    """A timing sweep: every number of drafts at each batch size. About a minute with SmolLM2-135M on two cores."""

    num_speculative_tokens: PositiveInt = 8  # 1 to this many, or as many as the draft can
    batch_sizes: list[PositiveInt] = Field(default=[1, 8], min_length=1)  # timed; those between are interpolated
    repeats: PositiveInt = 3  # batches that are decoded in every way

    def objections(self) -> Iterator[str]:
        yield from unless_rising("batch_sizes", self.batch_sizes, "size")


class SuiteConfig(Settings):
    """Prompts to evaluate on: a file, or a `datasets` data set. `eval/suites/README.md` says what the formats are."""

    name: str | None = None  # in the report and the gate's rules; None: that of the file or data set
    path: str = "eval/suites/house64.jsonl"  # a file; a data set's folder or Hub id (owner/name)
    # Where the prompt stands, as a text, a list of turns or chat messages; None: by the keys of the first row
    column: str | None = None
    subset: str | None = None  # data set: configuration name
    split: str = "test"  # data set
    num_prompts: PositiveInt | None = None  # at most, spread evenly over the categories; None: all
    system: str | None = None  # the system message of prompts that have none; None: none, so that of the chat template
    # A first turn that fills the target's context ends the run, or is left out; the report warns of how many
    on_too_long: Policy = "refuse"

    @property
    def label(self) -> str:
        """Its name, or that of the file or data set."""
        return self.name or Path(self.path).stem


class LosslessConfig(Settings):
    """How far a greedy token may lie below the target's likeliest, and how samples are tested."""

    # How far a token's logit may lie below the largest, in rounding errors of a logit at its position
    tie_noise: Annotated[float, Field(ge=0, le=20)] = 4.5
    num_answers: PositiveInt = 256  # that are read, of each mode; of more, evenly chosen ones
    # At temperature > 0: samples of one text whose first tokens are counted and tested against their exact probabilities. 0: no
    # test. 10 s of one core with SmolLM2-135M.
    first_token_samples: NonNegativeInt = 512


FreeDraft = Literal["prompt_lookup", "suffix_lookup"]  # ways of drafting that need no training: they copy from a text
SUFFIX_DRAFTS = 8  # of suffix lookup a round at most; it ends a chain where that has become improbable


class EvalConfig(Settings):
    """`eval/run.py`: decode with a draft, compare with plain decoding, write the report."""

    target: TargetConfig = TargetConfig()
    # An artifact, the output folder of its training, or any causal LM with the target's tokenizer: a folder, or
    # owner/name[@revision] on the Hub. Or a list, merged into one tree
    draft: str | list[str] = "runs/distill/artifact"
    # Where a lookup is one of the baselines, one draft of chains is also measured with suffix lookup before it, round by round:
    # accepted drafts that the lookup must expect to take a round. None: 2.25 at temperature 0, 6 at temperature 1
    lookup_expects: NonNegativeFloat | None = None
    # A data file, such as the one the draft was trained on, whose answers suffix lookup knows from the start, but those to
    # prompts of the suites
    lookup_answers: str | None = None
    draft_device: str | None = None  # of draft LMs, such as cuda:1; None: the target's. Not yet run on two accelerators
    allow_target_mismatch: bool = False  # decode with a draft trained for another target; else it is refused
    # Above temperature 0 one draft is also measured with its drafts chosen the other way, without `lossy`: drawn and judged
    # token by token where decode.verification takes the likeliest (one_hot), those where it draws
    other_verification: bool = True
    suite: SuiteConfig = SuiteConfig()
    # Further suites, measured in the same run and reported beside it. Without `suite` the first of these stands in its place
    suites: list[SuiteConfig] = []
    decode: DecodeConfig = DecodeConfig()
    # generation_config: temperature, top_k, top_p, min_p and repetition_penalty are the target's own, as vLLM takes them for
    # requests that name none, whatever `decode` says of them
    sampling_from: Literal["decode", "generation_config"] = "decode"
    repeats: PositiveInt = 2  # interleaved: plain, speculative, baselines, plain, ...
    warmup_prompts: NonNegativeInt = 1  # decoded before timing starts
    baselines: list[FreeDraft] = ["prompt_lookup"]  # measured beside the draft (`eval.measure.interleaved`)
    lookup_num_speculative_tokens: PositiveInt = 4  # a round of prompt lookup; of 2, 3, 4 and 8 the fastest of the demo
    lossless: LosslessConfig = LosslessConfig()
    cost: CostConfig | None = None  # a timing sweep, from which the speed at other settings is predicted; None: no prediction
    quality: QualityConfig | None = None  # what answers are worth, with and without the draft; a lossy mode needs it
    energy: bool = False  # joules per token, by the machine's own counters where they can be read
    output: str = "runs/eval"  # folder: report.json, report.html, report.md, records.jsonl
    overwrite: bool = False  # write over the report of another target, draft or suite in `output`; else that is refused

    @property
    def all_suites(self) -> list[SuiteConfig]:
        """The suite that the report is of first, then the further ones."""
        return [self.suite, *self.suites]

    @model_validator(mode="before")
    @classmethod
    def _first_of_the_suites(cls, values: Any) -> Any:
        if isinstance(values, dict) and "suite" not in values and isinstance(values.get("suites"), list) and values["suites"]:
            first, *others = values["suites"]
            return {**values, "suite": first, "suites": others}
        return values

    @property
    def drafts(self) -> list[str]:
        """The artifact folders that `draft` names."""
        return [self.draft] if isinstance(self.draft, str) else self.draft

    @property
    def lookup_must_expect(self) -> float:
        """How many accepted drafts suffix lookup must expect to take a round."""
        return 2.25 + 3.75 * self.decode.temperature if self.lookup_expects is None else self.lookup_expects

    @property
    def suffix_length(self) -> int:
        """Drafts a round of suffix lookup at most, among the baselines and where it takes a round from the draft."""
        own = self.decode.num_speculative_tokens
        return max(SUFFIX_DRAFTS, own) if own else 0

    def sampled_by(self, sampling: dict[str, Any]) -> EvalConfig:
        """Return the same with other sampling in `decode`; a ValidationError says what it does not go with."""
        decode = self.decode.model_dump(exclude_unset=True) | sampling
        return EvalConfig.model_validate(self.model_dump(exclude_unset=True) | {"decode": decode})

    @property
    def tries_other_verification(self) -> bool:
        """Whether the draft is also measured with its drafts chosen the other way."""
        fits = self.decode.temperature > 0 and self.decode.lossy is None and self.decode.num_speculative_tokens > 0
        return self.other_verification and len(self.drafts) == 1 and fits

    @property
    def tries_lookup(self) -> bool:
        """Whether the draft is also measured with suffix lookup beside it."""
        fits = self.decode.num_speculative_tokens > 0 and self.decode.lossy is None and self.decode.tree is None
        return bool(self.baselines) and len(self.drafts) == 1 and fits

    @field_validator("draft", mode="before")
    @classmethod
    def _draft_is_named_by_text(cls, value: Any) -> Any:
        """Say in one sentence what pydantic would say once for each form that a draft may have."""
        if not all(isinstance(each, str) for each in (value if isinstance(value, list) else [value])):
            raise ValueError(f"expected an artifact folder or a list of them, got {value!r}")
        return value

    def objections(self) -> Iterator[str]:
        yield from self._objections_to_drafts()
        names = [suite.label for suite in self.all_suites]
        if len(set(names)) < len(names):
            yield f"suites must have different names, got {names}: give each its `name`"
        yield from unless_once("baselines", self.baselines, "way")
        decode = self.decode
        if decode.lossy is not None and self.quality is None:
            yield (
                f"decode.lossy {decode.lossy.kind} changes answers, and nothing judges them: set quality "
                "(quality.perplexity=true or more), or decode.lossy to null"
            )
        if self.energy and self.draft_device is not None:
            yield "energy is read of the target's device only: set draft_device to null, or energy to false"
        if self.cost is None:
            return
        for name in ("tree", "stopping"):
            if getattr(decode, name) is not None:
                yield f"cost predicts chains of a fixed length only: set it to null, or decode.{name} to null"
        if self.target.is_split:
            yield "cost times a target that is whole in its process: set it to null, or target.shards to 1"
        if decode.rule == "smc":
            yield "cost predicts rounds of verification, which lossy smc has none of: set one of the two to null"

    def _objections_to_drafts(self) -> Iterator[str]:
        decode = self.decode
        if not self.drafts:
            yield "draft names no artifact folder: give one, or a list of several"
        if not set(get_args(FreeDraft)).isdisjoint(self.drafts):
            yield f"draft names artifacts, got {self.drafts}; a lookup is one of the baselines"
        if len(set(self.drafts)) < len(self.drafts):
            yield f"draft names the same folder twice, got {self.drafts}; a draft adds nothing to itself"
        if len(self.drafts) == 1:
            return
        if decode.tree is None or decode.num_speculative_tokens == 0:
            yield (
                "several drafts are merged into a tree: set decode.tree, for instance to a static one with branching "
                "[1, 1, 1], and decode.num_speculative_tokens to at least its depth"
            )
        if decode.draws:
            yield (
                f"tokens of several drafts cannot be drawn from one distribution, as rule {decode.rule} asks for: set "
                "decode.verification to one_hot, or decode.temperature to 0"
            )


class CompareConfig(Settings):
    """`eval/compare.py`: several reports side by side."""

    output: str = "runs/comparison.md"


class GateRule(Settings):
    """One threshold on one number of the report, named by its dotted path, e.g. `acceptance.tokens_per_target_step`.

    `by_category.*.acceptance.tokens_per_target_step` holds every category of the report to the same threshold.
    """

    metric: str  # dotted path of a number in report.json
    suite: str | None = None  # name of the suite that the number is of; None: the report's first
    min: float | None = None  # the lowest value that passes; None: no limit
    max: float | None = None  # the highest value that passes; None: no limit
    bound: Literal["point", "confidence"] = "confidence"  # confidence: the interval must clear the threshold
    relative_to_baseline: bool = False  # of tau and decode speedup: the threshold is a ratio to the baseline report's

    def objections(self) -> Iterator[str]:
        if (self.min is None) == (self.max is None):
            yield "give exactly one of min and max"
        if self.relative_to_baseline and self.metric not in RELATIVE:
            yield f"{self.metric} cannot be relative to a baseline; {' and '.join(RELATIVE)} can"


class GateConfig(Settings):
    """`eval/gate.py`: what a report must show before its draft may be released."""

    rules: list[GateRule] = []
    # Verdicts on the output that pass.
    lossless: list[Literal["lossless", "lossless_up_to_ties", "lossy_by_design"]] = ["lossless", "lossless_up_to_ties"]
    min_prompts: PositiveInt = 1  # that the report must be of
    # Ways to decode that need no training, measured in the same run: on every suite both tau and speed must lie above theirs;
    # `fastest`: the speed above that of whichever of them is the fastest there
    must_beat: list[FreeDraft | Literal["fastest"]] = []
    # Tokens per target step in the engine (`draftsmith check`) over the report's on the same prompts, at least. None: a draft
    # that was not tried in an engine passes, one whose interval there lies below 0.9 does not
    served_tau_ratio: PositiveFloat | None = None
    allow_unknown_training: bool = False  # the draft may be one that does not say on which prompts it was trained
    suite_sha256: str | None = None  # what the report's prompts must hash to (its prompts.sha256)
    allow_target_mismatch: bool = False  # the draft may have been made for other weights than those it was measured with

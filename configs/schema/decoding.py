"""How tokens are chosen and decoded: sampling, drafting, verification, and the lossy modes. Imports no torch.

`DecodeConfig.rule` is the verification rule that the settings come to (`eval.decoder.verifier`), and `DecodeConfig.draws` how
drafts are chosen: a rule is lossless only for drafts chosen the way it expects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from configs.schema.base import NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare, Settings, Share, Temperature
from configs.schema.drafting import CostStopping, DynamicTree, FastestTree, StaticTree, StoppingConfig, TreeConfig

Verification = Literal["token", "block", "match"]
Lossless = Literal["greedy", Verification, "without_replacement", "with_replacement", "k_seq"]
Rule = Literal[Lossless, "typical", "smc", "neighbourhood", "tolerance"]


class SamplingConfig(Settings):
    """How tokens are chosen from logits: temperature, then top-k, then top-p. Temperature 0 is greedy."""

    temperature: Temperature = 0.0  # 0: greedy
    top_k: PositiveInt | None = None  # sample among so many of the likeliest tokens; None: all
    top_p: PositiveShare | None = None  # sample among the fewest tokens of this probability together; None: all


class TypicalAcceptance(Settings):
    """Keep the drafts that the target finds plausible (Medusa; Cai et al., 2401.10774): p > min(epsilon, delta exp(-H(p)))."""

    kind: Literal["typical"]
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.09  # a token above it is plausible after any text
    delta: PositiveFloat = 0.3  # share of exp(-entropy in nats) that suffices where the target is undecided
    # Which of the draft's tokens are offered; the paper's are the likeliest.
    drafts: Literal["likeliest", "drawn"] = "likeliest"


class ParticleSampling(Settings):
    """Continue several copies of a text, weighed by the target in place of verification (SMC-SD, 2604.15672)."""

    kind: Literal["smc"]
    num_particles: PositiveInt = 8  # copies of each prompt
    resample_below: Share = 0.5  # of num_particles: with fewer effective ones they are resampled; 0: never


class NeighbourhoodAcceptance(Settings):
    """Move probability to a draft from the codes nearest to it, then judge without loss (LANTERN, 2410.03355)."""

    kind: Literal["neighbourhood"]
    k: PositiveInt = 8  # nearest codes of each that may give
    delta: Share = 0.2  # the most probability that is moved; 0 is lossless
    table: str  # of nearest codes, written by eval/neighbours.py


class TolerantAcceptance(Settings):
    """Keep a draft where one of several draws of the target's is that token or one near it (2410.21951)."""

    kind: Literal["tolerance"]
    samples: PositiveInt = 2  # draws of the target's; with 1 and no table it is lossless
    k: NonNegativeInt = 0  # nearest codes of a draft that pass for it; 0: only itself, as in the paper
    table: str | None = None  # of nearest codes, written by eval/neighbours.py; needed for k above 0
    delta: Share = 1.0  # the most probability that is moved in a step; 1: no limit, as in the paper; 0 is lossless
    # Which of the draft's tokens are offered; the paper's are the likeliest. These are for chains only.
    drafts: Literal["likeliest", "drawn"] = "drawn"

    def objections(self) -> Iterator[str]:
        if (self.k > 0) != (self.table is not None):
            yield f"lossy.k above 0 and a lossy.table of eval/neighbours.py go together, got {self.k} and {self.table}"


class NeighboursConfig(Settings):
    """`eval/neighbours.py`: the table of each code's nearest ones, by the distances of their vectors."""

    codebook: str  # the vectors [codes, width]: a .npy file, or one of safetensors
    tensor: str | None = None  # safetensors: which one; None: the only one
    first_id: NonNegativeInt = 0  # token id of the first code; the others follow
    vocab_size: PositiveInt  # of the target; tokens that are no codes have no neighbours
    k: PositiveInt = 64  # neighbours of each code, the nearest first; decoding may take fewer
    output: str = "runs/neighbours.safetensors"


LossyConfig = Annotated[
    TypicalAcceptance | ParticleSampling | NeighbourhoodAcceptance | TolerantAcceptance | None, Field(discriminator="kind")
]


class DecodeConfig(SamplingConfig):
    """One way of decoding. `num_speculative_tokens: 0` is plain decoding through the same loop."""

    num_speculative_tokens: NonNegativeInt = 3  # drafted in a round; 0: plain decoding
    stopping: StoppingConfig = None  # when a round drafts fewer; None: never by choice
    # At temperature 0 all three are the greedy rule. None: block for chains; for trees token, or match where nothing is drawn
    verification: Verification | None = None
    max_new_tokens: PositiveInt = 128  # longer answers are cut off
    batch_size: PositiveInt = 1  # prompts decoded together
    seed: NonNegativeInt = 0  # of sampling
    # Strings in the answer's text that end it with the token that completes the first of them; None: only ends of text do.
    stop: list[str] | None = None
    # int8: the target keeps keys and values in 8 bits, for half the memory, which changes its distribution a little, also in
    # plain decoding; None: in its dtype
    kv_cache: Literal["int8"] | None = None
    # Several candidates for each position, down to num_speculative_tokens; None: a chain; fastest: a section of that kind. At a
    # temperature above 0, `token` judges siblings as `tree.candidates` says, `match` takes the draft's likeliest
    tree: TreeConfig = None
    # Above temperature 0: give up the target's distribution for speed; needs the quality measured beside it. None: lossless
    lossy: LossyConfig = None

    @property
    def rule(self) -> Rule:
        """The verification rule that these settings come to."""
        if self.temperature == 0:
            return "greedy"
        if self.lossy is not None:
            return self.lossy.kind
        if self.tree is None:
            return self.verification or "block"
        candidates = self.tree.drawn_candidates
        return candidates if candidates != "top_k" and self.draws else "match"

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn from the draft's distribution; else they are its likeliest tokens."""
        if self.temperature == 0 or (self.tree is not None and self.tree.drawn_candidates == "top_k"):
            return False
        if isinstance(self.lossy, TypicalAcceptance | TolerantAcceptance):
            return self.lossy.drafts == "drawn"
        return self.verification != "match"

    @field_validator("tree", mode="before")
    @classmethod
    def _tree_may_be_a_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value != "fastest":
            raise ValueError(f"tree must be null, fastest, or a section of kind static, dynamic or fastest, got {value!r}")
        return {"kind": value}

    def objections(self) -> Iterator[str]:
        if self.tree is not None and self.num_speculative_tokens > 0:
            yield from self._objections_to_tree(self.tree)
        if self.lossy is not None:
            yield from self._objections_to_lossy(self.lossy)
        if self.stop is not None and not (self.stop and all(self.stop)):
            yield f"stop must hold strings of one character or more, got {self.stop}; null is for none"
        for stop in self.stop or []:
            if "\ufffd" in stop:
                yield f"stop: {stop!r} holds U+FFFD, as which every unfinished character is shown; leave it out"
        if isinstance(self.stopping, CostStopping):
            known, needed = len(self.stopping.target_step_milliseconds), self.num_speculative_tokens + 1
            if known < needed:
                yield (
                    f"stopping.target_step_milliseconds must have {needed} entries or more, for 1 to {needed} rows "
                    f"(num_speculative_tokens + 1), got {known}"
                )

    def _objections_to_tree(self, tree: StaticTree | DynamicTree | FastestTree) -> Iterator[str]:
        if not isinstance(tree, DynamicTree) and tree.depth > self.num_speculative_tokens:
            yield (
                f"tree is {tree.depth} tokens deep, and num_speculative_tokens allows {self.num_speculative_tokens}; "
                "raise that, or cut the tree"
            )
        if self.stopping is not None:
            yield "stopping cuts chains only: set it to null, or tree to null"
        if self.temperature == 0:
            return
        if self.verification == "block":
            yield "verification block judges chains only: set it to null, token or match, or tree to null"
        if self.verification == "token" and isinstance(tree, DynamicTree):
            yield (
                "a dynamic tree leaves out drafts for their probability, so they cannot be drawn at a temperature above 0: "
                "set verification to match, or tree to a static one"
            )
        if self.verification == "match" and tree.candidates not in (None, "top_k"):
            yield (
                f"tree.candidates {tree.candidates} are drawn, and verification match judges the draft's likeliest: set one of "
                "the two to null"
            )

    def _objections_to_lossy(
        self, lossy: TypicalAcceptance | ParticleSampling | NeighbourhoodAcceptance | TolerantAcceptance
    ) -> Iterator[str]:
        tree = self.tree
        if self.temperature == 0:
            yield "lossy has nothing to relax at temperature 0: raise temperature, or set lossy to null"
        if self.verification is not None:
            yield f"lossy {lossy.kind} takes the place of verification {self.verification}: set one of the two to null"
        if isinstance(lossy, ParticleSampling):
            if tree is not None or self.stopping is not None:
                yield "lossy smc drafts chains of one length: set tree and stopping to null"
        elif isinstance(lossy, TypicalAcceptance):
            if isinstance(tree, DynamicTree) and lossy.drafts == "drawn":
                yield "a dynamic tree takes the likeliest drafts: set lossy.drafts to likeliest, or tree to a static one"
            candidates = None if tree is None else tree.candidates
            if candidates is not None and (candidates == "top_k") != (lossy.drafts == "likeliest"):
                yield f"tree.candidates {candidates} and lossy.drafts {lossy.drafts} contradict each other: set one to null"
        elif tree is not None:
            likeliest = isinstance(lossy, TolerantAcceptance) and lossy.drafts == "likeliest"
            if likeliest or tree.drawn_candidates == "top_k":
                yield (
                    f"lossy {lossy.kind} judges drafts that were drawn in trees: set tree to null, or to a static one whose "
                    "candidates are drawn, and lossy.drafts to drawn"
                )

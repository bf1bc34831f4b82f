"""How tokens are chosen and decoded: sampling, drafting, verification, and the lossy modes. Imports no torch.

`DecodeConfig.rule` is the verification rule that the settings come to (`eval.decoder.verifier`), and `DecodeConfig.draws` how
drafts are chosen: a rule is lossless only for drafts chosen the way it expects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from configs.schema.base import NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare, Settings, Share, Temperature
from configs.schema.drafting import DynamicTree, StaticTree, StoppingConfig, TreeConfig

Verification = Literal["token", "block", "match"]
Lossless = Literal["greedy", Verification, "without_replacement", "with_replacement", "k_seq"]
Rule = Literal[Lossless, "typical", "smc", "neighbourhood"]


class SamplingConfig(Settings):
    """How tokens are chosen from logits: temperature, then top-k, then top-p. Temperature 0 is greedy."""

    temperature: Temperature = 0.0  # 0: greedy
    top_k: PositiveInt | None = None  # sample among so many of the likeliest tokens; None: all
    top_p: PositiveShare | None = None  # sample among the fewest tokens of this probability together; None: all


class TypicalAcceptance(Settings):
    """Keep the drafts that the target finds plausible (Medusa; Cai et al., 2401.10774): p > min(epsilon, delta exp(-H(p))).

    The draft offers its likeliest tokens."""

    kind: Literal["typical"]
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.09  # a token above it is plausible after any text
    delta: PositiveFloat = 0.3  # share of exp(-entropy in nats) that suffices where the target is undecided


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
    codebook: str  # the codes' vectors [codes, width], whose distances count: a .npy file
    first_id: NonNegativeInt = 0  # token id of the first code; the others follow. Other tokens have no neighbours


LossyConfig = Annotated[TypicalAcceptance | ParticleSampling | NeighbourhoodAcceptance | None, Field(discriminator="kind")]


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
    # Several candidates for each position, down to num_speculative_tokens; None: a chain. At a temperature above 0, `token`
    # judges siblings as `tree.candidates` says, `match` takes the draft's likeliest
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
        if self.verification == "match":
            return "match"
        if self.tree is None:
            return self.verification or "block"
        return self.tree.candidates if isinstance(self.tree, StaticTree) else "match"

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn from the draft's distribution; else they are its likeliest tokens."""
        return self.temperature > 0 and self.verification != "match" and not isinstance(self.lossy, TypicalAcceptance)

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

    def _objections_to_tree(self, tree: StaticTree | DynamicTree) -> Iterator[str]:
        if not isinstance(tree, DynamicTree) and tree.depth > self.num_speculative_tokens:
            yield (
                f"tree is {tree.depth} tokens deep, and num_speculative_tokens allows {self.num_speculative_tokens}; "
                "raise that, or cut the tree"
            )
        if self.stopping is not None:
            yield "stopping cuts chains only: set it to null, or tree to null"
        if self.temperature == 0:
            return
        if isinstance(tree, DynamicTree):
            yield "a dynamic tree is for temperature 0: set tree to a static one, or to null"
        if self.verification == "block":
            yield "verification block judges chains only: set it to null, token or match, or tree to null"

    def _objections_to_lossy(self, lossy: TypicalAcceptance | ParticleSampling | NeighbourhoodAcceptance) -> Iterator[str]:
        if self.temperature == 0:
            yield "lossy has nothing to relax at temperature 0: raise temperature, or set lossy to null"
        if self.verification is not None:
            yield f"lossy {lossy.kind} takes the place of verification {self.verification}: set one of the two to null"
        if isinstance(lossy, ParticleSampling) and (self.tree is not None or self.stopping is not None):
            yield "lossy smc drafts chains of one length: set tree and stopping to null"

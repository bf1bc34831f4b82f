"""How tokens are chosen and decoded: sampling, drafting, verification, and the lossy modes. Imports no torch.

`DecodeConfig.rule` is the verification rule that the settings come to (`eval.decoder.verifier`), and `DecodeConfig.draws` how
drafts are chosen: a rule is lossless only for drafts chosen the way it expects. The confidence of a distribution is its largest
probability; it is taken of the distribution that drafts are drawn from, at temperature 1 where decoding is greedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Annotated, Literal, Self

from pydantic import Field

from configs.schema.base import NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare, Settings, Share, Temperature

Path = tuple[int, ...]
Candidates = Literal["without_replacement", "with_replacement", "k_seq"]


class StaticTree(Settings):
    """The same tree in every round: a drafted token is named by the ranks that lead to it, `[0, 2]` being the third child of
    the first. Give the tokens, or how many children each token of a depth has."""

    kind: Literal["static"]
    paths: list[list[NonNegativeInt]] | None = None  # every drafted token by the ranks that lead to it
    branching: list[PositiveInt] | None = None  # [3, 2]: three tokens at depth 1, two below each of them
    # At a temperature above 0, how siblings are drawn from the draft's distribution, and the rule that judges them: one after
    # the other, or independently, with recursive rejection or SpecTr's k-SEQ. Not read where the likeliest are taken
    # (`verification: one_hot`, typical acceptance)
    candidates: Candidates = "without_replacement"

    def objections(self) -> Iterator[str]:
        if (self.paths is None) == (self.branching is None):
            yield "give exactly one of paths and branching"
        if self.paths is not None:
            yield from unless_a_tree(self.paths)
        elif not self.branching:
            yield "branching must name at least one depth, such as [2, 1]"

    def all_paths(self) -> list[Path]:
        """Return every token's path, parents before children and siblings in their order."""
        if self.paths is not None:
            return sorted((tuple(path) for path in self.paths), key=lambda path: (len(path), path))
        counts = self.branching or []
        levels = (product(*map(range, counts[:depth])) for depth in range(1, len(counts) + 1))
        return [path for level in levels for path in level]

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        return max(map(len, self.paths or [])) if self.branching is None else len(self.branching)


class DynamicTree(Settings):
    """A tree grown anew in each round, where the draft is sure (EAGLE-2). Its depth is `num_speculative_tokens`."""

    kind: Literal["dynamic"]
    num_nodes: PositiveInt = 16  # drafted tokens that the target judges in a round
    width: PositiveInt = 4  # tokens of a depth that are continued, and candidates for what follows each of them


TreeConfig = Annotated[StaticTree | DynamicTree | None, Field(discriminator="kind")]


def unless_a_tree(paths: Sequence[Sequence[int]]) -> Iterator[str]:
    """Object to a list of paths that is empty, names a token twice, or leaves out a parent or an earlier sibling of one."""
    known = {tuple(path) for path in paths}
    if not known or () in known:
        yield "paths must name at least one token, and none by an empty path, which would be the pending token"
    if len(known) < len(paths):
        yield "paths must name each token once"
    for path in sorted(known - {()}):
        if path[:-1] and path[:-1] not in known:
            yield f"paths is no tree: {list(path)} is there, its parent {list(path[:-1])} is not"
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
            before = [*path[:-1], path[-1] - 1]
            yield f"paths must take siblings in their order: {list(path)} is there, {before} is not"


# What a rule takes for a draft's confidence: the largest probability of its distribution, or a head's own estimate of its
# acceptance (dspark).
ConfidenceBy = Literal["distribution", "estimate"]


class ConfidenceStopping(Settings):
    """The token drawn from a distribution less confident than this is the round's last."""

    rule: Literal["confidence"]
    threshold: Share = 0.4  # the draft's highest probability, or its estimate
    by: ConfidenceBy = "distribution"  # estimate: the draft's own estimate of its acceptance, of a head that makes one (dspark)


StoppingConfig = ConfidenceStopping | None


Verification = Literal["one_hot", "token", "block"]
Lossless = Literal["greedy", Verification, "without_replacement", "with_replacement", "k_seq"]
Rule = Literal[Lossless, "typical", "smc", "neighbourhood"]


class SamplingConfig(Settings):
    """How tokens are chosen from logits: temperature, then top-k, top-p and min-p. Temperature 0 is greedy."""

    temperature: Temperature = 0.0  # 0: greedy
    top_k: PositiveInt | None = None  # sample among so many of the likeliest tokens; None: all
    top_p: PositiveShare | None = None  # sample among the fewest tokens of this probability together; None: all
    min_p: PositiveShare | None = None  # sample among tokens of at least this share of the likeliest's probability; None: all


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


Penalty = Annotated[float, Field(ge=-2, le=2)]  # in logits, of a token that was given before
LossyConfig = Annotated[TypicalAcceptance | ParticleSampling | NeighbourhoodAcceptance | None, Field(discriminator="kind")]


class DecodeConfig(SamplingConfig):
    """One way of decoding. `num_speculative_tokens: 0` is plain decoding through the same loop."""

    num_speculative_tokens: NonNegativeInt = 3  # drafted in a round; 0: plain decoding
    stopping: StoppingConfig = None  # when a round drafts fewer; None: never by choice
    # one_hot: drafts are the draft's likeliest tokens, judged by rejection against a one-hot q, as vLLM does by default. token,
    # block: drafts are drawn from the draft's distribution q. At temperature 0 all three are the greedy rule. None: one_hot for
    # chains, token for trees; `lossy` has its own way
    verification: Verification | None = None
    # Penalties for tokens that a text holds already, of target and draft alike, before the temperature; each draft counts for
    # those behind it. The first, of prompt and answer, divides positive logits and multiplies others. The others, of the answer
    # alone as in vLLM, are taken off the logit: once, and for each time that the token was given. None: none
    repetition_penalty: PositiveFloat | None = None
    presence_penalty: Penalty | None = None  # taken off the logits of tokens that the answer has
    frequency_penalty: Penalty | None = None  # the same, for each time that a token was given
    max_new_tokens: PositiveInt = 128  # longer answers are cut off
    batch_size: PositiveInt = 1  # prompts decoded together
    seed: NonNegativeInt = 0  # of sampling
    # int8: the target keeps keys and values in 8 bits, for half the memory, which changes its distribution a little, also in
    # plain decoding; None: in its dtype
    kv_cache: Literal["int8"] | None = None
    # Several candidates for each position, down to num_speculative_tokens; None: a chain. At a temperature above 0, `token`
    # judges siblings as `tree.candidates` says, `one_hot` takes the draft's likeliest
    tree: TreeConfig = None
    # Above temperature 0: give up the target's distribution for speed; needs the quality measured beside it. None: lossless
    lossy: LossyConfig = None

    @property
    def rule(self) -> Rule:
        """The verification rule that these settings come to."""
        return self.lossless_rule if self.temperature == 0 or self.lossy is None else self.lossy.kind

    @property
    def lossless_rule(self) -> Lossless:
        """The same without `lossy`: the rule that a neighbourhood relaxes."""
        if self.temperature == 0:
            return "greedy"
        if self.tree is None:
            return self.verification or ("one_hot" if self.lossy is None else "block")
        return self.tree.candidates if self.verification != "one_hot" and isinstance(self.tree, StaticTree) else "one_hot"

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn from the draft's distribution; else they are its likeliest tokens."""
        return self.lossless_rule not in ("greedy", "one_hot") and not isinstance(self.lossy, TypicalAcceptance)

    @property
    def otherwise(self) -> Self:
        """The same with drafts chosen the other way: drawn where they are the likeliest, or the reverse."""
        return self.model_copy(update={"verification": "one_hot" if self.draws else "token"})

    @property
    def penalises(self) -> bool:
        """Whether a token's probability depends on how often the text holds it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (None, None, None)

    def objections(self) -> Iterator[str]:
        if self.penalises and self.num_speculative_tokens > 0 and (self.tree is not None or self.rule == "smc"):
            key = "tree" if self.tree is not None else "lossy"
            yield f"{key}: penalties are for chains that are verified; set {key} to null, or each penalty"
        if self.tree is not None and self.num_speculative_tokens > 0:
            yield from self._objections_to_tree(self.tree)
        if self.lossy is not None:
            yield from self._objections_to_lossy(self.lossy)

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
            yield "verification block judges chains only: set it to null, token or one_hot, or tree to null"

    def _objections_to_lossy(self, lossy: TypicalAcceptance | ParticleSampling | NeighbourhoodAcceptance) -> Iterator[str]:
        if self.temperature == 0:
            yield "lossy has nothing to relax at temperature 0: raise temperature, or set lossy to null"
        if self.verification is not None:
            yield f"lossy {lossy.kind} takes the place of verification {self.verification}: set one of the two to null"
        if isinstance(lossy, ParticleSampling) and (self.tree is not None or self.stopping is not None):
            yield "lossy smc drafts chains of one length: set tree and stopping to null"

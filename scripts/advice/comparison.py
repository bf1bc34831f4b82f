"""Ways of decoding with the advised draft, in turns on held-out prompts: chain, trees, prompt lookup, lookup before the draft.

One request at a time, all ways on each. The tree is chosen on some prompts that are not measured (`eval.cost.tree_choice`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from configs.schema.commands.advising import AdviceConfig
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import DynamicTree, FastestTree, Path, StaticTree
from configs.schema.evaluation import EvalConfig
from distill.dataset.conversations import Conversation
from eval.cost.tree_choice import choose_tree
from eval.decoder.decode import Request, decode
from eval.decoder.records import AUTOREGRESSIVE, Timing
from eval.measure.proposers import add_lookup
from eval.stats.bootstrap import Interval, paired_ratio_interval, ratio_interval
from heads.artifact import Draft
from heads.frozen.loading import Target
from heads.proposers.lookup import PromptLookup
from heads.proposers.protocol import Proposer, TreeProposer
from scripts.advice.measuring import SEED, to_request

Way = tuple[DecodeConfig, Proposer]

CHAIN, LOOKUP, BOTH = "chain", "prompt lookup", "prompt lookup, then the draft"
CHOOSING = 4  # prompts that the tree is chosen on
MIN_PROMPTS = 2


@dataclass(frozen=True, kw_only=True)
class ComparedWay:
    """A way of decoding; ratios are of tokens a second, paired by prompt."""

    name: str
    tau: Interval
    speedup: Interval  # to plain decoding
    to_chain: Interval  # to the draft's chains


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All ways; `tree` is the static one's paths."""

    num_prompts: int
    ways: list[ComparedWay]
    tree: list[Path]

    @property
    def chosen(self) -> str:
        """The fastest of those that are faster than the chain beyond noise; the chain where none is."""
        better = [each for each in self.ways if each.name != CHAIN and (each.to_chain.low or 0.0) > 1]
        return max(better, key=lambda each: each.speedup.point or 0.0, default=self.way(CHAIN)).name

    def way(self, name: str) -> ComparedWay:
        return next(each for each in self.ways if each.name == name)


def compare_ways(
    target: Target,
    draft: Draft,
    rows: Sequence[Conversation],
    drafts: int,
    longest: int,
    config: AdviceConfig,
    allows: Callable[[float], bool],
) -> Comparison | None:
    """Decode as many prompts as there is time for; None with fewer than two.

    Args:
        drafts: a round of the chain; `longest`: that a round may have.
        allows: whether there is time for so many more seconds.
    """
    choosing = min(CHOOSING, len(rows) // 2)
    if len(rows) - choosing < MIN_PROMPTS:
        return None
    settings = DecodeConfig(num_speculative_tokens=drafts, max_new_tokens=config.answers.max_new_tokens)
    ways: dict[str, Way] = {
        CHAIN: (settings, draft.proposer),
        LOOKUP: (settings, PromptLookup(target.device)),
        BOTH: (settings, add_lookup(draft.proposer, EvalConfig(), target)),
    }
    requests = [to_request(row) for row in rows]
    paths: list[Path] = []
    if isinstance(draft.proposer, TreeProposer):
        deep, asked = settings.model_copy(update={"num_speculative_tokens": longest}), FastestTree(kind="fastest")
        paths = choose_tree(target, draft.proposer, draft.metadata.kind, requests[:choosing], deep, asked).paths
        ways |= {shape: (each, draft.proposer) for shape, each in tree_settings(settings, paths).items()}
    timings = _in_turns(target, requests[choosing - 1 :], ways, settings, allows)
    chain, plain, samples = timings[CHAIN], timings[AUTOREGRESSIVE], config.bootstrap_samples
    if len(chain) < MIN_PROMPTS:
        return None
    compared = []
    for name in ways:
        own = timings[name]
        tau = ratio_interval([each.num_tokens for each in own], [each.num_rounds for each in own], samples=samples, seed=SEED)
        speedup, to_chain = (_faster(own, other, samples) for other in (plain, chain))
        compared.append(ComparedWay(name=name, tau=tau, speedup=speedup, to_chain=to_chain))
    return Comparison(num_prompts=len(chain), ways=compared, tree=paths)


def tree_settings(settings: DecodeConfig, paths: Sequence[Path]) -> dict[str, DecodeConfig]:
    """Return settings for a static tree of these paths, and for one grown anew each round of as many tokens."""
    static = StaticTree(kind="static", paths=[list(path) for path in paths])
    grown = DynamicTree(kind="dynamic", num_nodes=len(paths), width=min(4, len(paths)))
    depth = max(static.depth, settings.num_speculative_tokens)
    return {
        f"{tree.kind} tree": settings.model_copy(update={"tree": tree, "num_speculative_tokens": depth})
        for tree in (static, grown)
    }


def _in_turns(
    target: Target,
    requests: Sequence[Request],
    ways: Mapping[str, Way],
    settings: DecodeConfig,
    allows: Callable[[float], bool],
) -> dict[str, list[Timing]]:
    """Decode requests plainly and in all ways, one after another while there is time; the first warms up and has no timing."""
    timings: dict[str, list[Timing]] = {name: [] for name in (AUTOREGRESSIVE, *ways)}
    slowest = 0.0
    for number, request in enumerate(requests):
        if not allows(slowest):
            break
        started = time.monotonic()
        found = {AUTOREGRESSIVE: decode(target, [request], settings)[1]}
        found |= {name: decode(target, [request], own, drafter, mode=name)[1] for name, (own, drafter) in ways.items()}
        slowest = max(slowest, time.monotonic() - started)
        if number and found[AUTOREGRESSIVE].num_tokens:
            for name, timing in found.items():
                timings[name].append(timing)
    return timings


def _faster(ours: Sequence[Timing], theirs: Sequence[Timing], samples: int) -> Interval:
    """Return our tokens a second over theirs on the same prompts in the same order."""
    return paired_ratio_interval(
        [each.decode_seconds for each in theirs],
        [each.num_tokens for each in theirs],
        [each.decode_seconds for each in ours],
        [each.num_tokens for each in ours],
        samples=samples,
        seed=SEED,
    )

"""Ways of decoding with the advised draft, in turns on held-out prompts: chain, trees, prompt lookup, lookup before the draft.

One request at a time, all ways on each. The tree is chosen on some prompts that are not measured (`eval.cost.tree_choice`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from configs.schema.commands.advising import AdviceConfig
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import FastestTree, Path
from configs.schema.evaluation import EvalConfig
from distill.dataset.conversations import Conversation
from eval.cost.tree_choice import choose_tree
from eval.decoder.decode import Request, decode
from eval.decoder.records import AUTOREGRESSIVE, Timing
from eval.measure.proposers import add_lookup
from eval.stats.bootstrap import Interval, ratio_interval
from heads.artifact import Draft
from heads.frozen.loading import Target
from heads.proposers.prompt_lookup import PromptLookup
from heads.proposers.protocol import Proposer, TreeProposer
from scripts.trials.turns import SEED, Turn, columns, speed_ratio, to_request, tree_settings

Way = tuple[DecodeConfig, Proposer]

CHAIN, LOOKUP, BOTH = "chain", "prompt lookup", "prompt lookup, then the draft"
CHOOSING = 4  # prompts that the tree is chosen on
MIN_PROMPTS = 2  # prompts of a category that is shown


@dataclass(frozen=True, kw_only=True)
class ComparedWay:
    """A way of decoding; ratios are of tokens a second, paired by prompt."""

    name: str
    tau: Interval
    speedup: Interval  # to plain decoding
    to_chain: Interval  # to the draft's chains


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All ways; `tree` is the static one's paths, `lookup_by_category` the lookup's speed over the chain's."""

    num_prompts: int
    ways: list[ComparedWay]
    tree: list[Path]
    lookup_by_category: dict[str, Interval]

    @property
    def chosen(self) -> ComparedWay:
        """The fastest of those that are faster than the chain beyond noise; the chain where none is."""
        chain = next(each for each in self.ways if each.name == CHAIN)
        better = [each for each in self.ways if each is not chain and (each.to_chain.low or 0.0) > 1]
        return max(better, key=lambda each: each.speedup.point or 0.0, default=chain)


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
        rows: of different prompts.
        drafts: a round of the chain.
        longest: drafts that a round may have.
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
    if len(timings[CHAIN]) < MIN_PROMPTS:
        return None
    category_of = {request.prompt_id: request.category for request in requests}
    samples = config.bootstrap_samples
    return Comparison(
        num_prompts=len(timings[CHAIN]),
        ways=[
            ComparedWay(
                name=name,
                tau=ratio_interval(
                    *columns([(each.num_tokens, each.num_rounds) for each in timings[name]]), samples=samples, seed=SEED
                ),
                speedup=_faster(timings[name], timings[AUTOREGRESSIVE], samples),
                to_chain=_faster(timings[name], timings[CHAIN], samples),
            )
            for name in ways
        ],
        tree=paths,
        lookup_by_category=_by_category(timings, category_of, samples),
    )


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
    one, other = ([[Turn(each, each.decode_seconds)] for each in side] for side in (ours, theirs))
    return speed_ratio(one, other, lambda timing: timing.num_tokens, samples=samples)


def _by_category(timings: dict[str, list[Timing]], category_of: dict[str, str], samples: int) -> dict[str, Interval]:
    """Return the lookup's speed over the chain's by category, where there are several and each has enough prompts."""
    found = {}
    for category in sorted(set(category_of.values())):
        ours, theirs = (
            [each for each in timings[name] if category_of[each.prompt_ids[0]] == category] for name in (LOOKUP, CHAIN)
        )
        if len(ours) >= MIN_PROMPTS:
            found[category] = _faster(ours, theirs, samples)
    return found if len(set(category_of.values())) > 1 else {}

"""The static tree that is the fastest for a draft here, by what it shows on prompts that are not judged.

Decoding with a wide tree gives the acceptance profile `[D, R]`: entry (d, r) is how often the target, having followed the tree
to depth d, continues with the child of rank r. It is taken to be the same on every branch of a depth; the expected accepted
drafts of a tree are then the sum over its tokens of the products of entries on their paths (Cai et al. 2024, Medusa,
2401.10774). A round's seconds are those of drafting, a depth at a time or in one forward, and the others; both are measured in
rounds with trees of a few sizes. Trees are paths of ranks, as in `configs.schema.drafting.StaticTree`. D depths, R ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from accelerate import PartialState
from numpy.typing import NDArray

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import FastestTree, StaticTree
from configs.schema.drafting import Path as TreePath
from configs.schema.evaluation import EvalConfig
from distill.generation.prompts import fit_prompts
from eval.decoder.decode import Request, decode
from eval.decoder.records import SPECULATIVE, Generation
from eval.measure.proposers import EvaluatedDraft
from eval.measure.record_files import choose_once
from eval.measure.suite import Suite, Turns
from heads.families.registry import drafts_in_one_forward
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer

log = logging.getLogger("draftsmith")

TIMED_PROMPTS = 8  # by size of tree

Profile = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ChosenTree:
    """A tree and what is expected of it."""

    paths: list[TreePath]
    tokens_per_round: float  # the target's own counted
    seconds_per_round: float  # by the costs it was chosen with


def find_tree(
    config: EvalConfig, suite: Suite, target: Target, draft: EvaluatedDraft, state: PartialState, job: str
) -> tuple[DecodeConfig, str | None]:
    """Return the decoding settings with the tree that `decode.tree: fastest` asks for, and a sentence on how it was found.

    Other settings are returned as they are, with None. All processes must call this; the main one's tree is everyone's. A run
    that is resumed keeps its tree.
    """
    decode_by, asked = config.decode, config.decode.tree
    if not isinstance(asked, FastestTree) or decode_by.num_speculative_tokens == 0:
        return decode_by, None
    prompts, _ = fit_prompts(target, suite.left_out[: asked.num_prompts], "skip", decode_by.max_new_tokens)
    if not prompts:
        raise InputError(
            f"decode.tree fastest: no prompt of suite {suite.source} is left to choose the tree by, as all are measured; set "
            f"suite.num_prompts to less than {len(suite.prompts)}, or give a static tree"
        )

    def choose() -> dict[str, Any]:
        requests, kind = Turns(target, prompts).first, draft.parts[0].metadata.kind
        chosen = choose_tree(target, draft.proposer, kind, requests, decode_by, asked)
        return {"paths": chosen.paths, "expected": chosen.tokens_per_round}

    known = choose_once(Path(config.output), "tree", job, state, choose)
    tree = StaticTree(kind="static", paths=[list(path) for path in known["paths"]], candidates=asked.candidates)
    log.info("decode.tree: the fastest is %s", tree.paths)
    return decode_by.model_copy(update={"tree": tree}), (
        f"decode.tree was chosen for this machine, by {len(prompts)} of the suite's prompts that are not measured: size "
        f"{len(tree.all_paths())}, depth {tree.depth}, {known['expected']:.2f} tokens a round expected"
    )


def choose_tree(
    target: Target, draft: Proposer, kind: str, requests: Sequence[Request], settings: DecodeConfig, asked: FastestTree
) -> ChosenTree:
    """Return the tree of at most `num_speculative_tokens` depths with the most tokens a second, a request at a time."""
    wide = asked.measured(settings.num_speculative_tokens)
    settings = settings.model_copy(update={"tree": wide})
    decoded = [decode(target, [request], settings, draft, mode=SPECULATIVE) for request in requests]
    profile = measure_profile([each for generations, _ in decoded for each in generations], wide.all_paths())
    at_once = drafts_in_one_forward(kind)  # a deeper tree takes the draft no longer
    rows, steps = round_seconds(target, draft, requests[:TIMED_PROMPTS], settings, profile, asked, at_once=at_once)
    if at_once:
        return fastest_tree(profile, [other + step for other, step in zip(rows, steps, strict=True)], [0.0] * len(rows))
    return fastest_tree(profile, rows, steps)


def round_seconds(
    target: Target,
    draft: Proposer,
    requests: Sequence[Request],
    settings: DecodeConfig,
    profile: Profile,
    asked: FastestTree,
    *,
    at_once: bool,
) -> tuple[list[float], list[float]]:
    """Return the seconds of a round but for drafting, and those of drafting a depth, with trees of 0, 1, ... tokens.

    They are the medians of prompts decoded with the likeliest trees of 1, 3, 7, ... tokens and of all, by turns; between these
    sizes they are interpolated. Where a draft makes all drafts `at_once`, the latter are those of all depths.
    """
    likeliest = [list(path) for path, _ in _likeliest(profile, asked.num_nodes)]
    most = len(likeliest)
    sizes = sorted({1, *(2**power - 1 for power in range(2, most) if 2**power < most), most})
    trees = {size: StaticTree(kind="static", paths=likeliest[:size], candidates=asked.candidates) for size in sizes}
    others: dict[int, list[float]] = {size: [] for size in sizes}
    drafting: dict[int, list[float]] = {size: [] for size in sizes}
    for number, request in enumerate(requests):
        for size in sizes[:: -1 if number % 2 else 1]:
            _, timing = decode(target, [request], settings.model_copy(update={"tree": trees[size]}), draft, mode=SPECULATIVE)
            if timing.num_rounds:
                others[size].append((timing.decode_seconds - timing.draft_seconds) / timing.num_rounds)
                drafting[size].append(timing.draft_seconds / timing.num_rounds / (1 if at_once else trees[size].depth))

    def by_size(seconds: Mapping[int, Sequence[float]]) -> list[float]:
        medians = [median(seconds[size] or [0.0]) for size in sizes]
        return [float(each) for each in np.interp(range(asked.num_nodes + 1), sizes, medians)]

    return by_size(others), by_size(drafting)


def measure_profile(generations: Sequence[Generation], paths: Sequence[TreePath]) -> Profile:
    """Return the acceptance profile of decoding with one static tree; what was never tried is 0.

    A child counts as tried where its parent was accepted, the round drafted that deep and the text had not ended. Rounds of a
    lookup do not count.
    """
    known = set(paths)
    shape = max(map(len, known)), 1 + max(path[-1] for path in known)
    tried, accepted = np.zeros(shape), np.zeros(shape)
    rounds = (round_ for generation in generations for round_ in generation.rounds)
    for round_ in (round_ for round_ in rounds if round_.drafted and not round_.by_lookup):
        if round_.ranks is None or (round_.ranks and round_.ranks not in known):
            raise ValueError(f"a round accepted the path {round_.ranks}, which the tree does not hold")
        for depth in range(min(len(round_.drafted), round_.num_accepted + (not round_.was_cut))):
            parent = round_.ranks[:depth]
            tried[depth] += [(*parent, rank) in known for rank in range(shape[1])]
            if depth < len(round_.ranks):
                accepted[depth, round_.ranks[depth]] += 1
    return np.divide(accepted, tried, out=np.zeros(shape), where=tried > 0)


def fastest_tree(profile: Profile, target_seconds: Sequence[float], draft_step_seconds: Sequence[float]) -> ChosenTree:
    """Return the tree with the most expected tokens a second.

    `target_seconds` are those of a round but for drafting, with trees of 0, 1, ... tokens, the last of which bounds the tree,
    and `draft_step_seconds` those of drafting one depth of them.
    """
    best = ChosenTree(paths=[], tokens_per_round=1.0, seconds_per_round=float("inf"))
    for depth in range(1, len(profile) + 1):
        tokens = _likeliest(profile[:depth], len(target_seconds) - 1)
        for size, accepted in enumerate(accumulate(chance for _, chance in tokens), 1):
            seconds = target_seconds[size] + depth * draft_step_seconds[size]
            if (1.0 + accepted) / seconds > best.tokens_per_round / best.seconds_per_round:
                paths = sorted((path for path, _ in tokens[:size]), key=lambda path: (len(path), path))
                best = ChosenTree(paths=paths, tokens_per_round=1.0 + accepted, seconds_per_round=seconds)
    return best


def _likeliest(profile: Profile, num_nodes: int) -> list[tuple[TreePath, float]]:
    """Return the tokens that are accepted most often, with their chances: the best tree of each size is the first of them.

    Where a rank showed more than the one before it, which only chance explains, the two change places.
    """
    falling = -np.sort(-profile, axis=1)
    found: list[tuple[TreePath, float]] = []
    # The chance, negative, the path, and the parent's chance.
    waiting: list[tuple[float, TreePath, float]] = [(-float(falling[0, 0]), (0,), 1.0)]
    while waiting and len(found) < num_nodes:
        negative, path, parent = heappop(waiting)
        found.append((path, -negative))
        depth, rank = len(path), path[-1] + 1
        if rank < falling.shape[1]:
            heappush(waiting, (-parent * float(falling[depth - 1, rank]), (*path[:-1], rank), parent))
        if depth < len(falling):
            heappush(waiting, (negative * float(falling[depth, 0]), (*path, 0), -negative))
    return found

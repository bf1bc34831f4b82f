"""The static tree that is the fastest for a draft here, by what it shows on prompts that are not judged.

Decoding with a wide tree gives the acceptance profile `[D, R]`: entry (d, r) is how often the target, having followed the tree
to depth d, continues with the child of rank r. It is taken to be the same on every branch of a depth; the expected accepted
drafts of a tree are then the sum over its tokens of the products of entries on their paths (Cai et al. 2024, Medusa,
2401.10774). A round's seconds are those of drafting, a depth at a time or in one forward, and of the target's forward over its
rows. Trees are paths of ranks, as in `configs.schema.drafting.StaticTree`. D depths, R ranks, N tokens of a tree.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from numpy.typing import NDArray

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import FastestTree, StaticTree
from configs.schema.drafting import Path as TreePath
from configs.schema.evaluation import EvalConfig
from distill.generation.prompts import fit_prompts
from eval.decoder.decode import Request, decode
from eval.decoder.records import SPECULATIVE, Generation, Round
from eval.measure.proposers import EvaluatedDraft
from eval.measure.record_files import choose_once
from eval.measure.suite import Suite
from eval.measure.turns import Turns
from heads.families.registry import drafts_in_one_forward
from heads.frozen.hidden_states import forward_states
from heads.frozen.loading import Target
from heads.inference.causal_lm import head_logits, new_cache
from heads.proposers.protocol import Proposer

log = logging.getLogger("draftsmith")

KEY = "tree"
TIMED_FORWARDS = 9  # by number of rows

Profile = NDArray[np.float64]


def find_tree(
    config: EvalConfig, suite: Suite, target: Target, draft: EvaluatedDraft, state: PartialState, job: str
) -> tuple[DecodeConfig, str | None]:
    """Return the settings of decoding with the tree that `decode.tree: fastest` asks for, and a sentence on how it was found.

    Other settings are returned as they are, with None. All processes must call this; the main one's tree is everyone's. A run
    that is resumed keeps its tree.

    Args:
        config: of the evaluation.
        suite: its first suite.
        target, draft: what decodes; a single draft.
        state: of the processes.
        job: fingerprint of the evaluation.

    Raises:
        InputError: the suite has no prompts that are left to choose by, or the draft drafts no trees.
    """
    decode_by, asked = config.decode, config.decode.tree
    if not isinstance(asked, FastestTree) or decode_by.num_speculative_tokens == 0:
        return decode_by, None
    left = suite.left_out[: asked.num_prompts]
    prompts, _ = fit_prompts(target, left, "skip", decode_by.max_new_tokens)
    if not prompts:
        raise InputError(
            f"decode.tree fastest: no prompt of suite {suite.source} is left to choose the tree by, as all are measured; set "
            f"suite.num_prompts to less than {len(suite.prompts)}, or give a static tree"
        )

    def choose() -> dict[str, Any]:
        requests, kind = Turns(target, prompts).first, draft.parts[0].metadata.kind
        chosen = choose_tree(target, draft.proposer, kind, requests, decode_by, asked)
        return {"paths": chosen.paths, "expected": chosen.tokens_per_round}

    known = choose_once(Path(config.output), KEY, job, state, choose)
    tree = StaticTree(kind="static", paths=[list(path) for path in known["paths"]], candidates=asked.candidates)
    log.info("decode.tree: the fastest is %s", tree.paths)
    return decode_by.model_copy(update={"tree": tree}), (
        f"decode.tree was chosen for this machine, by {len(prompts)} of the suite's prompts that are not measured: size "
        f"{len(tree.all_paths())}, depth {tree.depth}, {known['expected']:.2f} tokens a round expected"
    )


def choose_tree(
    target: Target, draft: Proposer, kind: str, requests: Sequence[Request], settings: DecodeConfig, asked: FastestTree
) -> ChosenTree:
    """Return the tree with the most tokens a second.

    Args:
        target, draft: what decodes.
        kind: of the draft's artifact.
        requests: to decode, one at a time.
        settings: how; the tree is at most `num_speculative_tokens` deep.
        asked: the size of the tree, and the wider one that acceptance is measured with.

    Raises:
        InputError: the draft drafts no trees.
    """
    wide = asked.measured(settings.num_speculative_tokens)
    settings = settings.model_copy(update={"tree": wide})
    decoded = [decode(target, [request], settings, draft, mode=SPECULATIVE) for request in requests]
    profile = measure_profile([each for generations, _ in decoded for each in generations], wide.all_paths())
    # Of a round. The median, as the first prompt's holds what the draft does once (compiling).
    drafting = median([timing.draft_seconds / timing.num_rounds for _, timing in decoded if timing.num_rounds] or [0.0])
    rows = row_seconds(target, requests[0], asked.num_nodes + 1)
    if drafts_in_one_forward(kind):  # a deeper tree takes the draft no longer
        return fastest_tree(profile, [each + drafting for each in rows], 0.0)
    return fastest_tree(profile, rows, drafting / wide.depth)


@torch.inference_mode()
def row_seconds(target: Target, request: Request, max_rows: int) -> list[float]:
    """Return the median seconds of the target's forward over 1, 2, ... `max_rows` rows that follow a prompt."""
    length = len(request.tokens)
    cache = new_cache(target.model, length + max_rows)
    ids_1T = torch.tensor([request.tokens], device=target.device)
    media = target.media_inputs([request.media_prompt], [request.tokens])
    forward_states(target.model, cache, ids_1T, [0], (), media=media)
    seconds: list[list[float]] = [[] for _ in range(max_rows)]
    for _ in range(TIMED_FORWARDS):
        for rows in range(1, max_rows + 1):
            ids_1K = ids_1T[:, -1:].expand(1, rows)
            started = time.perf_counter()
            states = forward_states(target.model, cache, ids_1K, [length], ())
            float(head_logits(target.model, states.final_BTE).amax())  # waits for the device
            seconds[rows - 1].append(time.perf_counter() - started)
    return [median(each) for each in seconds]


@dataclass(frozen=True, kw_only=True)
class ChosenTree:
    """A tree and what is expected of it."""

    paths: list[TreePath]
    tokens_per_round: float  # the target's own counted
    seconds_per_round: float  # by the costs it was chosen with


def measure_profile(generations: Sequence[Generation], paths: Sequence[TreePath]) -> Profile:
    """Return the acceptance profile of decoding with one static tree.

    A child counts as tried where its parent was accepted, the round drafted that deep and the text had not ended. The wider the
    tree, the more ranks are seen; what was never tried is 0.

    Raises:
        ValueError: a round was no tree's, or accepted what the tree does not hold.
    """
    known = set(paths)
    shape = max(map(len, known)), 1 + max(path[-1] for path in known)
    tried, accepted = np.zeros(shape), np.zeros(shape)
    for round_ in (round_ for generation in generations for round_ in generation.rounds if round_.drafted):
        if round_.ranks is None or (round_.ranks and round_.ranks not in known):
            raise ValueError(f"a round accepted the path {round_.ranks}, which the tree does not hold")
        for depth in range(_num_judged(round_)):
            way = round_.ranks[:depth]
            tried[depth] += [(*way, rank) in known for rank in range(shape[1])]
            if depth < len(round_.ranks):
                accepted[depth, round_.ranks[depth]] += 1
    return np.divide(accepted, tried, out=np.zeros(shape), where=tried > 0)


def fastest_tree(profile: Profile, target_seconds: Sequence[float], draft_step_seconds: float) -> ChosenTree:
    """Return the tree with the most expected tokens a second.

    Args:
        profile: `[D, R]`.
        target_seconds: what a target forward takes over 1, 2, ... rows, two at least; the last one bounds the tree.
        draft_step_seconds: what drafting one depth takes, whatever its width.
    """
    by_depth = [_Forests(profile[:depth], len(target_seconds) - 1) for depth in range(1, len(profile) + 1)]
    trees = [
        (forests, size, 1.0 + forests.value(size), target_seconds[size] + depth * draft_step_seconds)
        for depth, forests in enumerate(by_depth, 1)
        for size in range(1, len(target_seconds))
    ]
    forests, size, tokens, seconds = max(trees, key=lambda tree: tree[2] / tree[3])
    return ChosenTree(paths=forests.paths(size), tokens_per_round=tokens, seconds_per_round=seconds)


class _Forests:
    """The best forests of up to N tokens below a token of each depth.

    Sequoia's dynamic programme (Chen et al. 2024, 2402.12374), here for a profile that also goes by depth: siblings are taken
    in the order of their ranks, each with the best tree of some size below it.

    `best[d][r, n]` is the most that n tokens are worth in the trees of the children from rank r on, in accepted drafts given
    that their parent at depth d was accepted, -inf where n do not fit; `first[d][r, n]` is how many of them child r takes.
    """

    def __init__(self, profile: Profile, num_nodes: int) -> None:
        D, R = profile.shape
        empty = np.where(np.arange(num_nodes + 1) == 0, 0.0, -np.inf)
        below = empty
        self.best: list[NDArray[np.float64]] = []
        self.first: list[NDArray[np.int64]] = []
        for depth in reversed(range(D)):
            best, first = np.tile(empty, (R + 1, 1)), np.zeros((R + 1, num_nodes + 1), dtype=np.int64)
            for rank in reversed(range(R)):
                for n in range(1, num_nodes + 1):
                    worth = np.full(n, -np.inf)  # of taking 1, 2, ... n tokens
                    fits = np.isfinite(below[:n])
                    worth[fits] = profile[depth, rank] * (1.0 + below[:n][fits])
                    worth += best[rank + 1, n - 1 :: -1]
                    first[rank, n] = 1 + int(worth.argmax())
                    best[rank, n] = worth.max()
            self.best.insert(0, best)
            self.first.insert(0, first)
            below = best[0]

    def value(self, num_nodes: int) -> float:
        """Return what the best tree of exactly so many tokens is worth, -inf where they do not fit."""
        return float(self.best[0][0, num_nodes])

    def paths(self, num_nodes: int) -> list[TreePath]:
        """Return the best tree of exactly so many tokens."""
        return sorted(self._below((), num_nodes), key=lambda path: (len(path), path))

    def _below(self, parent: TreePath, num_nodes: int) -> list[TreePath]:
        paths: list[TreePath] = []
        rank = 0
        while num_nodes:
            taken = int(self.first[len(parent)][rank, num_nodes])
            child = (*parent, rank)
            paths += [child, *self._below(child, taken - 1)]
            num_nodes, rank = num_nodes - taken, rank + 1
        return paths


def _num_judged(round_: Round) -> int:
    """Return at how many depths of a round's tree the target chose."""
    return min(len(round_.drafted), round_.num_accepted + (not round_.was_cut))

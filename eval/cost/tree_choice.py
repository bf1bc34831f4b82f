"""The static tree that is the fastest for a draft here, by what it shows on prompts that are not judged.

Decoding them with a wide tree gives how often each rank is accepted at each depth, and the time of drafting a depth or, in one
forward, all of them; the target's time by rows is that of forwards after one of the prompts. `eval.cost.tree_shapes` finds the
tree by these.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import PartialState

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import FastestTree, StaticTree
from configs.schema.evaluation import EvalConfig
from distill.generation.prompts import fit_prompts
from eval.cost.tree_shapes import ChosenTree, fastest_tree, measure_profile
from eval.decoder.decode import Request, decode
from eval.decoder.records import SPECULATIVE
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


def find_tree(
    config: EvalConfig, suite: Suite, target: Target, draft: EvaluatedDraft, state: PartialState, job: str
) -> tuple[DecodeConfig, str | None]:
    """Return the settings of decoding with the tree that `decode.tree: fastest` asks for, and a sentence on how it was found.

    Other settings are returned as they are, with None. All processes must call this; the main one's tree is everyone's. A run
    that was cut off goes on with the tree that it had.

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
def row_seconds(target: Target, request: Request, most: int) -> list[float]:
    """Return the median seconds of the target's forward over 1, 2, ... `most` rows that follow a prompt."""
    length = len(request.tokens)
    cache = new_cache(target.model, length + most)
    ids_1T = torch.tensor([request.tokens], device=target.device)
    media = target.media_inputs([request.media_prompt], [request.tokens])
    forward_states(target.model, cache, ids_1T, [0], (), media=media)
    seconds: list[list[float]] = [[] for _ in range(most)]
    for _ in range(TIMED_FORWARDS):
        for rows in range(1, most + 1):
            ids_1K = ids_1T[:, -1:].expand(1, rows)
            started = time.perf_counter()
            states = forward_states(target.model, cache, ids_1K, [length], ())
            float(head_logits(target.model, states.final_BTE).amax())  # waits for the device
            seconds[rows - 1].append(time.perf_counter() - started)
    return [median(each) for each in seconds]

"""The choice of the target's blocks that a draft keeps: the first, the last, evenly spread, or searched.

The search is small and greedy: starting from the spread layers, one kept block at a time is exchanged for one left out, and the
exchange is kept if the untrained draft's mean acceptance on calibration answers rises. It depends on the data alone, so a
resumed run finds the same blocks. B batch, T positions, E width of the target.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from configs.runtime.errors import ConfigError
from configs.runtime.progress import progress
from configs.schema.learning import LossConfig, StudentConfig
from distill.dataset.batches import Example, collate
from distill.loss.draft_objective import DraftObjective, target_hidden
from distill.student.kept_blocks import keep_layers
from heads.frozen.loading import Target, move
from heads.modules.interface import Batch

log = logging.getLogger("draftsmith")

EXAMPLES_PER_BATCH = 8


def choose_layers(student: StudentConfig, target: Target, calibration: Sequence[Example]) -> list[int]:
    """Return the blocks that `student.layer_choice` asks for, in order; only `searched` reads the calibration answers.

    Raises:
        ConfigError: the target has fewer blocks.
        ValueError: the choice is `searched` and there are no answers.
    """
    count, total = student.num_layers or 0, target.model.config.get_text_config().num_hidden_layers
    if count > total:
        raise ConfigError(f"student.num_layers: expected at most the target's {total} blocks, got {count}")
    if student.layer_choice == "first":
        return list(range(count))
    if student.layer_choice == "last":
        return list(range(total - count, total))
    if student.layer_choice == "spread":
        return spread_layers(count, total)
    layers = search_layers(count, target, calibration[: student.search_conversations], student.search_trials)
    log.info("searched layers: %s", layers)
    return layers


def spread_layers(count: int, total: int) -> list[int]:
    """Return `count` of `total` blocks at even distances, the first and (from two on) the last among them."""
    return [number * (total - 1) // max(1, count - 1) for number in range(count)]


def search_layers(count: int, target: Target, calibration: Sequence[Example], trials: int) -> list[int]:
    """Return the best of the spread layers and at most `trials` greedy exchanges; `ValueError` without calibration answers."""
    if not calibration:
        raise ValueError("layers are searched by their acceptance on calibration answers, and there are none")
    groups = [calibration[start : start + EXAMPLES_PER_BATCH] for start in range(0, len(calibration), EXAMPLES_PER_BATCH)]
    batches = [collate(group).to(target.device) for group in groups]
    seen = [(batch, target_hidden(target, batch)) for batch in batches]
    total = target.model.config.get_text_config().num_hidden_layers
    generator = torch.Generator().manual_seed(0)
    best = spread_layers(count, total)
    best_score, tried = mean_acceptance(best, target, seen), {tuple(best)}
    with progress("searching layers", trials, "trials") as advance:
        for _ in range(trials):
            untried = [layers for layers in _exchanges(best, total) if tuple(layers) not in tried]
            if not untried:
                break
            layers = untried[int(torch.randint(len(untried), (), generator=generator))]
            tried.add(tuple(layers))
            score = mean_acceptance(layers, target, seen)
            if score > best_score:
                best, best_score = layers, score
            advance(1)
    return best


@torch.no_grad()
def mean_acceptance(layers: list[int], target: Target, seen: Sequence[tuple[Batch, Tensor]]) -> float:
    """Return the mean over labels of sum_v min(p, q) of an untrained draft of these blocks.

    `seen` are batches and the target's hidden states `[B, T, E]` on them.
    """
    draft = move(keep_layers(target.model, layers), target.device)
    objective = DraftObjective(draft.eval(), target, LossConfig())
    one = torch.ones((), device=target.device)
    results = [objective(batch, hidden_BTE, one, 1) for batch, hidden_BTE in seen]
    return float(torch.cat([result.acceptance_N for result in results]).mean())


def _exchanges(layers: list[int], total: int) -> list[list[int]]:
    """Return every choice that differs from `layers` in one block."""
    left_out = [layer for layer in range(total) if layer not in layers]
    return [sorted([new, *(layer for layer in layers if layer != old)]) for old in layers for new in left_out]

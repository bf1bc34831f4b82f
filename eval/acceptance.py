"""The report's acceptance section: counts over generations (`eval.metrics`), and intervals over their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.intervals import ratio_interval
from eval.metrics import acceptance_metrics, count_committed
from eval.records import Generation


def summarise_acceptance(generations: Sequence[Generation], num_positions: int, *, samples: int, seed: int) -> dict[str, Any]:
    """Return every acceptance number of one mode's generations, one a prompt.

    Args:
        generations: of different prompts, all decoded in the same mode.
        num_positions: the most tokens a round may draft; the length of every list by position.
        samples: bootstrap resamples of the prompts.
        seed: of the resampling.
    """
    metrics = acceptance_metrics(num_positions)
    metrics.update(generations)
    committed = np.array([count_committed(generation) for generation in generations], dtype=np.float64)
    rounds = np.array([len(generation.rounds) for generation in generations], dtype=np.float64)
    own = committed[rounds > 0] / rounds[rounds > 0]
    overlaps = [_overlaps(generation) for generation in generations]
    pooled = ratio_interval(committed, rounds, samples=samples, seed=seed)
    macro = ratio_interval(own, np.ones_like(own), samples=samples, seed=seed)
    alpha = ratio_interval([sum(each) for each in overlaps], [len(each) for each in overlaps], samples=samples, seed=seed)
    return {
        **metrics.compute(),
        "tokens_per_target_step_ci": pooled.bounds,
        "tokens_per_target_step_macro_ci": macro.bounds,
        "overlap_alpha_ci": alpha.bounds,
    }


def count_per_prompt(generations: Sequence[Generation]) -> dict[str, list[int]]:
    """Return `{prompt id: [committed tokens, rounds]}`, with which a later report is compared prompt by prompt."""
    return {generation.prompt_id: [count_committed(generation), len(generation.rounds)] for generation in generations}


def _overlaps(generation: Generation) -> list[float]:
    return [value for round_ in generation.rounds for value in round_.overlap or ()]

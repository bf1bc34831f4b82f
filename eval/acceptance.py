"""The report's acceptance section: counts over generations (`eval.metrics`), and intervals over their prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from eval.intervals import Floats, ratio_interval
from eval.metrics import acceptance_metrics, count_committed
from eval.records import Generation
from eval.round_table import LAWS, RoundTable, tabulate

COUNTED_TOGETHER = 32  # generations; a call of torchmetrics costs as much as counting many rounds
# What is kept of each prompt: sums over the rounds of all its turns.
COLUMNS = ("committed", "rounds", "accepted", "drafted", "compared", "overlap", "kl", "agrees")
# The numbers of `eval.metrics` that are a ratio of two of these, and so have an interval over prompts.
RATIOS = {
    "tokens_per_target_step": ("committed", "rounds"),
    "accepted_per_round": ("accepted", "rounds"),
    "draft_token_yield": ("accepted", "drafted"),
    "overlap_alpha": ("overlap", "compared"),
    "top1_agreement": ("agrees", "compared"),
    "kl_divergence": ("kl", "compared"),
}


class Acceptance:
    """The acceptance of one mode's generations, taken in some at a time; what it holds does not grow with their length.

    Args:
        num_positions: the most tokens a round may draft; the length of every list by position.
    """

    def __init__(self, num_positions: int) -> None:
        self.num_positions = num_positions
        # Processes agree by `merge`; a metric that waited for the others at `compute` would wait for ever in the main one.
        self._metrics = acceptance_metrics(num_positions, sync_on_compute=False, compute_with_cache=False)
        self._metrics.update(tabulate([]))  # torchmetrics warns of one that only merged
        self._sums: dict[str, Floats] = {}  # prompt id -> [COLUMNS]
        self._waiting: list[Generation] = []

    def add(self, generations: Iterable[Generation]) -> None:
        """Count generations of prompts that were not counted before, all turns of each."""
        self._waiting += generations
        if len(self._waiting) >= COUNTED_TOGETHER:
            self._count()

    def merge(self, other: Acceptance) -> None:
        """Add what another process, or another category, has counted of other prompts."""
        other._count()
        for name, metric in self._metrics.items():
            metric.merge_state(other._metrics[name])
        self._sums.update(other._sums)

    @property
    def num_prompts(self) -> int:
        """How many prompts were counted."""
        self._count()
        return len(self._sums)

    @property
    def per_prompt(self) -> dict[str, list[int]]:
        """`{prompt id: [committed tokens, rounds]}`, with which a later report is compared prompt by prompt."""
        self._count()
        return {prompt_id: [int(sums[0]), int(sums[1])] for prompt_id, sums in sorted(self._sums.items())}

    def summarise(self, *, samples: int, seed: int) -> dict[str, Any]:
        """Return every number, with intervals.

        Args:
            samples: bootstrap resamples of the prompts.
            seed: of the resampling.
        """
        self._count()
        # By id, so that the intervals do not depend on the order in which processes finished.
        rows = [sums for _, sums in sorted(self._sums.items())]
        sums_PF = np.stack(rows) if rows else np.zeros((0, len(COLUMNS)))
        column = {name: sums_PF[:, place] for place, name in enumerate(COLUMNS)}
        decoded = column["rounds"] > 0
        own = column["committed"][decoded] / column["rounds"][decoded]
        macro = ratio_interval(own, np.ones_like(own), samples=samples, seed=seed)
        numbers = {**self._metrics.compute(), "tokens_per_target_step_macro_ci": macro.bounds}
        for name, (above, below) in RATIOS.items():
            interval = ratio_interval(column[above], column[below], samples=samples, seed=seed)
            numbers[f"{name}_ci"] = interval.bounds if numbers[name] is not None else None
        return numbers

    def _count(self) -> None:
        """Count what was added since the last time."""
        table = tabulate(self._waiting)
        self._waiting = []
        self._metrics.update(table)
        self._sums.update(zip(table.prompt_ids, _sums_by_prompt(table), strict=True))


def summarise_acceptance(generations: Sequence[Generation], num_positions: int, *, samples: int, seed: int) -> dict[str, Any]:
    """Return every acceptance number of one mode's generations; see `Acceptance`."""
    acceptance = Acceptance(num_positions)
    acceptance.add(generations)
    return acceptance.summarise(samples=samples, seed=seed)


def count_per_prompt(generations: Iterable[Generation]) -> dict[str, list[int]]:
    """Return `{prompt id: [committed tokens, rounds]}`, summed over turns."""
    counts: dict[str, list[int]] = {}
    for generation in generations:
        own = counts.setdefault(generation.prompt_id, [0, 0])
        own[0] += count_committed(generation)
        own[1] += len(generation.rounds)
    return counts


def _sums_by_prompt(table: RoundTable) -> Floats:
    """Return the sums of `COLUMNS` by prompt, `[P, COLUMNS]`."""
    by_round = {
        "committed": table.committed_R,
        "rounds": torch.ones_like(table.prompt_R),
        "accepted": table.accepted_R,
        "drafted": table.judged_R,
    }
    by_draft = {name: table.laws_FN[LAWS.index(name)].nan_to_num(0.0) for name in ("overlap", "kl", "agrees")}
    by_draft["compared"] = torch.ones_like(by_draft["overlap"])
    sums = {name: table.sum_by_prompt(values_R, table.prompt_R) for name, values_R in by_round.items()}
    prompt_N = table.prompt_R[table.round_N]
    sums |= {name: table.sum_by_prompt(values_N, prompt_N) for name, values_N in by_draft.items()}
    columns: Floats = torch.stack([sums[name] for name in COLUMNS], 1).numpy()
    return columns

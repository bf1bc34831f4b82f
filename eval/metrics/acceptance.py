"""How many drafted tokens the target accepted: the report's acceptance section, from the rounds of whole prompts.

Counts are kept in torchmetrics states that add up over any split of the prompts over processes, and once more by prompt, for
the intervals. Ratios are formed once, from counts over all rounds: never a mean of ratios except where the name says `macro`.
A ratio with nothing to divide by is `None`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from eval.decoder.records import Generation, Round
from eval.metrics.distributions import CALIBRATIONS, Calibration, DistributionAgreement, Sums, ratio
from eval.metrics.round_table import RoundTable, tabulate
from eval.stats.bootstrap import Floats, ratio_interval

# Shapes: R rounds, C whether the end of the text cut the round (0 no, 1 yes), G number drafted, A number accepted.

BATCH_SIZE = 32  # generations counted together; a call of torchmetrics costs as much as counting many rounds
# What is kept of each prompt: sums over the rounds of all its turns.
COLUMNS = ("committed", "rounds", "accepted", "drafted", "compared", "overlap", "kl", "agrees", "looked_up", "copied")
# Then come committed tokens and rounds by class of how many tokens stood before the round, in the context and in the answer.
CLASSES_FROM = (0, *(2**power for power in range(4, 18)))
LENGTHS = ("by_context_tokens", "by_answer_tokens")
# The numbers that are a ratio of two of these, and so have an interval over prompts.
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

    A round may draft at most `num_positions` tokens; every list by position is as long.
    """

    def __init__(self, num_positions: int) -> None:
        self.num_positions = num_positions
        self._metrics = acceptance_metrics(num_positions)
        self._metrics.update(tabulate([]))  # torchmetrics warns of one that only merged
        self._sums: dict[str, Floats] = {}  # prompt id -> [COLUMNS, then LENGTHS x CLASSES_FROM x 2]
        self._waiting: list[Generation] = []

    def add(self, generations: Iterable[Generation]) -> None:
        """Count generations of prompts that were not counted before, all turns of each."""
        self._waiting += generations
        if len(self._waiting) >= BATCH_SIZE:
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

    def lookup_shares(self) -> dict[str, float | None]:
        """Return the lookup's share of the rounds, and of the drafts that were accepted."""
        self._count()
        sums = dict(zip(COLUMNS, self._table.sum(0), strict=False))
        pairs = {"lookup_rounds_share": ("looked_up", "rounds"), "lookup_tokens_share": ("copied", "accepted")}
        return {name: float(sums[above] / sums[below]) if sums[below] else None for name, (above, below) in pairs.items()}

    def by_length(self, *, samples: int, seed: int) -> dict[str, list[dict[str, Any]]]:
        """Return tokens per target step by tokens in the context, and by tokens of the answer, before a round."""
        self._count()
        counts_PLC2 = self._table[:, len(COLUMNS) :].reshape(-1, len(LENGTHS), len(CLASSES_FROM), 2)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in LENGTHS}
        for (place, name), (number, start) in product(enumerate(LENGTHS), enumerate(CLASSES_FROM)):
            committed_P, rounds_P = counts_PLC2[:, place, number].T
            if not rounds_P.any():
                continue
            tau = ratio_interval(committed_P, rounds_P, samples=samples, seed=seed)
            found[name].append(
                {
                    "from_tokens": start,
                    "to_tokens": 2 * start if start else CLASSES_FROM[1],
                    "num_prompts": int((rounds_P > 0).sum()),
                    "num_rounds": int(rounds_P.sum()),
                    "tokens_per_target_step": tau.point,
                    "tokens_per_target_step_ci": tau.bounds,
                }
            )
        return found

    @property
    def _table(self) -> Floats:
        """The sums of all prompts, by id, so that intervals do not depend on the order in which processes finished."""
        rows = [sums for _, sums in sorted(self._sums.items())]
        return np.stack(rows) if rows else np.zeros((0, len(COLUMNS) + 2 * len(LENGTHS) * len(CLASSES_FROM)))

    def summarise(self, *, samples: int, seed: int) -> dict[str, Any]:
        """Return every number, with intervals from `samples` bootstrap resamples of the prompts."""
        self._count()
        sums_PF = self._table
        column = {name: sums_PF[:, place] for place, name in enumerate(COLUMNS)}
        decoded = column["rounds"] > 0
        own = column["committed"][decoded] / column["rounds"][decoded]
        macro = ratio_interval(own, np.ones_like(own), samples=samples, seed=seed)
        numbers = {
            **self._metrics.compute(),
            "num_tokens": int(column["committed"].sum()),
            "num_rounds": int(column["rounds"].sum()),
            "tokens_per_target_step_macro": macro.point,
            "tokens_per_target_step_macro_ci": macro.bounds,
        }
        for name, (above, below) in RATIOS.items():
            interval = ratio_interval(column[above], column[below], samples=samples, seed=seed)
            numbers.setdefault(name, interval.point)
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


def count_committed(generation: Generation) -> int:
    """Return how many tokens the rounds of a generation committed; its prefill token is not among them."""
    return sum(len(round_.committed) for round_ in generation.rounds)


def was_cut(round_: Round) -> bool:
    """Say whether an accepted token ended the text, so that what was drafted behind it was never judged."""
    return len(round_.committed) == round_.num_accepted


# --- metrics -------------------------------------------------------------------------------------------------------


def acceptance_metrics(num_positions: int) -> MetricCollection:
    """Return all metrics of this file and of `eval.metrics.distributions` as one; `compute()` gives one flat dict."""
    metrics: dict[str, Metric | MetricCollection] = {name: Calibration(**given) for name, given in CALIBRATIONS.items()}
    metrics |= {"rounds": RoundAcceptance(num_positions), "agreement": DistributionAgreement(num_positions)}
    return MetricCollection(metrics, compute_groups=False)


class RoundAcceptance(Sums):
    """What became of the drafted tokens, all of it read from one table of rounds by (cut, drafted, accepted).

    A position is judged when every draft before it was accepted and the text had not ended. Drafts behind an accepted end
    of text count as drafted (they cost time) but not as judged: nobody knows whether they would have been accepted. Of a tree
    those on the way that was walked count; its yield counts all.
    """

    rounds_CGA: Tensor

    def __init__(self, num_positions: int) -> None:
        rounds_CGA = torch.zeros((2, num_positions + 1, num_positions + 1), dtype=torch.int64)
        super().__init__(rounds_CGA=rounds_CGA)
        self.num_positions = num_positions

    def update(self, table: RoundTable) -> None:
        """Count the rounds of some prompts.

        Raises:
            ValueError: a round drafted more than `num_positions` tokens.
        """
        size = self.num_positions + 1
        longest = int(table.drafted_R.max()) if len(table.drafted_R) else 0
        if longest > self.num_positions:
            raise ValueError(f"a round drafted {longest} tokens, more than num_positions={self.num_positions}")
        cells_R = (table.cut_R * size + table.drafted_R) * size + table.accepted_R
        counts = torch.bincount(cells_R, minlength=2 * size * size)
        self.rounds_CGA += counts.view(2, size, size).to(self.rounds_CGA.device)

    def compute(self) -> dict[str, list[int] | list[float | None]]:
        """Return the report's lists by draft position or by length, from 0."""
        rounds_GA = self.rounds_CGA.sum(0)
        return {
            # Accepted at a position, of those judged there and of all that drafted so far: the chance to get this far.
            "position_conditional": [self._accepted(position, position) for position in range(self.num_positions)],
            "position_survival": [self._accepted(position, 0) for position in range(self.num_positions)],
            "accepted_histogram": rounds_GA.sum(0).tolist(),
            "drafted_histogram": rounds_GA.sum(1).tolist(),
        }

    def _accepted(self, position: int, from_accepted: int) -> float | None:
        """Return accepted at `position` / rounds that drafted past it, kept `from_accepted` at least, uncut before."""
        whole_GA, cut_GA = self.rounds_CGA[:, position + 1 :]
        accepted = whole_GA[:, position + 1 :].sum() + cut_GA[:, position + 1 :].sum()
        refused = whole_GA[:, from_accepted : position + 1].sum()  # a cut round refused nothing
        return ratio(accepted, accepted + refused)


def _sums_by_prompt(table: RoundTable) -> Floats:
    """Return the sums of `COLUMNS`, and of what follows them, by prompt, `[P, COLUMNS + LENGTHS x CLASSES_FROM x 2]`."""
    by_round = {
        "committed": table.committed_R,
        "rounds": torch.ones_like(table.prompt_R),
        "accepted": table.accepted_R,
        "drafted": table.judged_R,
        "looked_up": table.by_lookup_R,
        "copied": table.accepted_R * table.by_lookup_R,
    }
    by_draft = {name: table.number_of(name).nan_to_num(0.0) for name in ("overlap", "kl", "agrees")}
    by_draft["compared"] = torch.ones_like(by_draft["overlap"])
    sums = {name: table.sum_by_prompt(values_R, table.prompt_R) for name, values_R in by_round.items()}
    prompt_N = table.prompt_R[table.round_N]
    sums |= {name: table.sum_by_prompt(values_N, prompt_N) for name, values_N in by_draft.items()}
    columns_PF = torch.stack([sums[name] for name in COLUMNS], 1)
    lengths = [_sums_by_class(table, before_R) for before_R in (table.context_R, table.answered_R)]
    rows: Floats = torch.cat([columns_PF, torch.stack(lengths, 1).flatten(1)], 1).numpy()
    return rows


def _sums_by_class(table: RoundTable, before_R: Tensor) -> Tensor:
    """Return committed tokens and rounds by prompt and class of the tokens before a round, `[P, CLASSES_FROM, 2]`."""
    num_classes, num_prompts = len(CLASSES_FROM), len(table.prompt_ids)
    class_R = torch.bucketize(before_R, torch.tensor(CLASSES_FROM), right=True) - 1
    place_R = table.prompt_R * num_classes + class_R
    sums = [
        torch.bincount(place_R, values_R.double(), minlength=num_prompts * num_classes)
        for values_R in (table.committed_R, torch.ones_like(place_R))
    ]
    return torch.stack(sums, 1).view(num_prompts, num_classes, 2)

"""How a ratio of sums changed between two runs over the same clusters (prompts, or batches of them). Imports no torch.

Both sides are resampled together, so that what makes a prompt hard or easy for both cancels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from eval.stats.bootstrap import Column, Floats, statistic_interval
from eval.stats.significance import detectable_percent

ChangeOutcome = Literal["better", "worse", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side's number: the product of the sums of the columns `above`, over that of those `below`."""

    above: tuple[Column, ...]
    below: tuple[Column, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """How one number changed; better or worse where the whole interval of the ratio lies above or below 1.

    Where it holds 1, a change smaller than about `detectable_percent` may still be there; more prompts would show it.
    """

    ours: float
    theirs: float
    ratio: float
    ratio_ci: list[float] | None
    outcome: ChangeOutcome
    detectable_percent: float | None
    num_clusters: int  # prompts, or batches of them for speed


def compare_sides(ours: Side, theirs: Side, *, samples: int, seed: int) -> Change | None:
    """Return how `ours` differs from `theirs`, clusters in the same order; `None` where one has nothing to divide by."""
    columns = (*ours.above, *ours.below, *theirs.above, *theirs.below)
    cuts = np.cumsum([len(ours.above), len(ours.below), len(theirs.above)])

    def both(sums: Floats) -> tuple[Floats, Floats]:
        a, b, c, d = (part.prod(axis=0) for part in np.split(sums, cuts))
        return a / b, c / d

    ratio = statistic_interval(lambda sums: np.divide(*both(sums)), *columns, samples=samples, seed=seed)
    if ratio.point is None:
        return None
    own, their = both(np.array([np.sum(column, dtype=np.float64) for column in columns]))
    low, high = ratio.bounds or (-np.inf, np.inf)
    return Change(
        ours=float(own),
        theirs=float(their),
        ratio=ratio.point,
        ratio_ci=ratio.bounds,
        outcome="better" if low > 1 else "worse" if high < 1 else "inconclusive",
        detectable_percent=detectable_percent((*ours.above, *theirs.below), (*ours.below, *theirs.above)),
        num_clusters=int(np.stack([np.asarray(column) for column in columns]).any(axis=0).sum()),
    )

"""Successive halving under a budget of wall-clock time (Jamieson and Talwalkar 2016, arXiv 1502.07943).

Optuna's and ray's pruners stop trials that report while they run, and bring a database or a cluster; here a trial is a training
of its own length, so that its learning-rate schedule is whole, and what is left is this loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from configs.runtime.files import read_object, write_json

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class Rung(Generic[C]):
    """The trials of one size: those that ran with their scores, best first, and those that failed or found no time."""

    size: int
    ranked: list[tuple[C, float]]
    failed: list[C]
    not_begun: list[C]


def successive_halving(
    candidates: Iterable[C],
    sizes: Sequence[int],
    run: Callable[[C, int], bool],
    score: Callable[[C, int], float],
    *,
    keep_share: float,
    may_begin: Callable[[C, int], bool],
) -> list[Rung[C]]:
    """Run all candidates at the first size, and of each size's the best share, at least one, at the next.

    `run` says whether a trial came to an end that can be scored; scores are asked for when all of a size have run.
    """
    rungs: list[Rung[C]] = []
    alive = list(candidates)
    for size in sizes:
        ran: list[C] = []
        failed: list[C] = []
        not_begun: list[C] = []
        for candidate in alive:
            if not may_begin(candidate, size):
                not_begun.append(candidate)
            else:
                (ran if run(candidate, size) else failed).append(candidate)
        if not ran:
            break
        ranked = sorted(((candidate, score(candidate, size)) for candidate in ran), key=lambda each: -each[1])
        rungs.append(Rung(size=size, ranked=ranked, failed=failed, not_begun=not_begun))
        alive = [candidate for candidate, _ in ranked[: max(1, math.ceil(keep_share * len(ranked)))]]
    return rungs


def sizes_up_to(first: int, growth: int, most: int) -> list[int]:
    """Return `first` and its multiples by powers of `growth` below `most`, and `most`; the last step is no small one."""
    sizes = [first]
    while sizes[-1] * growth <= most:
        sizes.append(sizes[-1] * growth)
    if sizes[-1] > most:
        return [most]
    return sizes if most < 1.5 * sizes[-1] else [*sizes, most]


class TimeBudget:
    """Wall-clock time over all sessions of a run, as kept in a file for this job alone, up to what was noted last."""

    def __init__(self, seconds: float, path: Path, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.path, self.clock = seconds, path, clock
        kept = read_object(path, "times of the advice") if path.is_file() else {}
        self.kept: dict[str, Any] = kept if kept.get("job") == job else {"job": job, "spent_seconds": 0.0}
        self._before = self.kept["spent_seconds"] - clock()

    @property
    def spent(self) -> float:
        """Seconds since the run's beginning, without those between its sessions."""
        return self._before + self.clock()

    def allows(self, seconds: float) -> bool:
        """Say whether there is time for so many more seconds."""
        return self.spent + seconds <= self.seconds

    def note(self, **values: Any) -> None:
        """Keep what was spent, and values beside it."""
        self.kept |= {**values, "spent_seconds": self.spent}
        write_json(self.path, self.kept)

"""Rows that cannot be prompts: why each is none, and whether it ends the run or is left out and counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from configs.runtime.errors import InputError
from configs.schema.base import Policy
from configs.schema.data import PromptsConfig

logger = logging.getLogger("draftsmith")

TOO_LONG = "too_long"
NUM_PLACES = 3  # of each reason that are named


class BadRow(InputError):
    """A row that cannot be a prompt."""

    def __init__(self, reason: str, found: str, where: str = "") -> None:
        """`reason` is what such rows are counted by, `found` a sentence about this one, `where` its place."""
        super().__init__(f"{where}: {found}" if where else found)
        self.reason, self.found, self.where = reason, found, where

    def at(self, where: str) -> BadRow:
        """Return it with the place of its row."""
        return BadRow(self.reason, self.found, where)


OnBadRow = Callable[[BadRow], None]


def refuse(row: BadRow) -> None:
    """End the run at a row."""
    raise row


@dataclass(kw_only=True)
class LeftOut:
    """Counts the rows that are left out, by reason; where such rows are refused, the first one ends the run."""

    on_bad_row: Policy = "refuse"
    on_too_long: Policy = "refuse"  # a prompt that fills the context
    max_share: float = 1.0  # of bad rows, those too long not counted
    counts: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0  # that were read, as far as `check` knows: fewer may be taken
    _first: dict[str, list[BadRow]] = field(default_factory=dict)  # those that were not logged yet

    def add(self, row: BadRow) -> None:
        """Count a row, or raise it."""
        key, policy = ("on_too_long", self.on_too_long) if row.reason == TOO_LONG else ("on_bad_row", self.on_bad_row)
        if policy == "refuse":
            raise BadRow(row.reason, f"{row.found}; {key}: skip leaves such rows out", row.where) from row
        self.count(row)

    def count(self, row: BadRow) -> None:
        """Count a row that is left out whatever was asked for."""
        self.counts[row.reason] += 1
        first = self._first.setdefault(row.reason, [])
        if len(first) < NUM_PLACES:
            first.append(row)

    def log(self) -> None:
        """Log what was left out since the last time."""
        for reason, rows in self._first.items():
            places = "; ".join(row.where for row in rows)
            logger.warning("left out, %s: %d rows, the first at %s: %s", reason, self.counts[reason], places, rows[0].found)
        self._first.clear()

    def check(self, num_kept: int) -> None:
        """Log what was left out; `InputError` where more than `max_share` of the rows are bad, or none is kept."""
        self.log()
        num_bad = self.counts.total() - self.counts[TOO_LONG]
        self.num_rows = max(self.num_rows, num_bad + num_kept)
        if num_bad > self.max_share * self.num_rows or not num_kept:
            found = f"{num_bad} of {self.num_rows} rows cannot be prompts (left out: {dict(self.counts)})"
            raise InputError(f"prompts.max_bad_share: {found}; it allows a share of {self.max_share:.2g}: correct the source")


def left_out_by(config: PromptsConfig) -> LeftOut:
    """Return the count of what a source leaves out, as its config asks for."""
    return LeftOut(on_bad_row=config.on_bad_row, on_too_long=config.on_too_long, max_share=config.max_bad_share)

"""How many drafted tokens the target accepted, and how alike the two distributions are: the report's acceptance section.

Every number is made of sums over one table of counts, a row a prompt: counts add up over any split of the prompts, intervals
draw whole prompts. Ratios are formed once, of sums over all rounds: never a mean of ratios except where the name says `macro`.
One with nothing to divide by is `None`. Distributions are compared up to and including the first rejected draft of each round
(`eval.decoder.verifier`). P prompts, R rounds, K draft positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.decoder.records import AUTOREGRESSIVE, FAILED, SPECULATIVE, Generation, Timing
from eval.stats import Floats, fields_of, ratio_interval

COMPARED = ("overlap", "uncovered")  # by draft, where measured
# The numbers of the report that divide two columns' sums, and so have an interval over prompts.
RATIOS = {
    "tokens_per_target_step": ("committed", "rounds"),
    "accepted_per_round": ("accepted", "rounds"),
    "draft_token_yield": ("accepted", "drafted"),
    "overlap_alpha": ("overlap", "num_overlap"),
    "uncovered_mass": ("uncovered", "num_uncovered"),
}

Table = NDArray[np.void]  # [P], with the fields of `columns`


def columns(num_positions: int) -> np.dtype[np.void]:
    """Return the fields of a prompt's counts, float64: sums over the rounds of all its turns.

    A position is judged when every draft before it was accepted and the text had not ended. Drafts behind an accepted end of
    text count as drafted (they cost time) but not as judged: nobody knows whether they would have been accepted. Of a tree the
    drafts on the way that was walked count; `drafted` counts all.
    """
    single = ("committed", "rounds", "accepted", "drafted")
    by_length, by_position = ("accepted_histogram", "drafted_histogram"), ("kept", "judged", "not_cut_before")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(single, ())
    shapes |= dict.fromkeys(by_length, (num_positions + 1,)) | dict.fromkeys(by_position, (num_positions,))
    shapes |= {f"{prefix}{name}": (num_positions,) for name in COMPARED for prefix in ("", "num_")}
    return np.dtype([(name, np.float64, shape) for name, shape in shapes.items()])


class Acceptance:
    """The acceptance of one mode's generations, whose rounds draft at most `num_positions` tokens."""

    def __init__(self, num_positions: int, generations: Iterable[Generation] = ()) -> None:
        self.num_positions = num_positions
        self.counts: dict[str, Table] = {}  # by prompt id, each without dimensions
        self.update(generations)

    def update(self, generations: Iterable[Generation]) -> None:
        """Count generations, each turn of a prompt once."""
        for generation in generations:
            counts = self.counts.setdefault(generation.prompt_id, np.zeros((), columns(self.num_positions)))
            if generation.rounds:
                count_rounds(generation, counts, self.num_positions)

    def among(self, prompt_ids: Collection[str]) -> Acceptance:
        """Return the acceptance on some of the prompts."""
        part = Acceptance(self.num_positions)
        part.counts = {prompt_id: counts for prompt_id, counts in self.counts.items() if prompt_id in prompt_ids}
        return part

    @property
    def per_prompt(self) -> dict[str, list[int]]:
        """`{prompt id: [committed tokens, rounds]}`, with which a later report is compared prompt by prompt."""
        rows = sorted(self.counts.items())
        return {prompt_id: [int(row["committed"]), int(row["rounds"])] for prompt_id, row in rows}

    def summarise(self) -> dict[str, Any]:
        """Return every number, with intervals over prompts; lists go by draft position or by length, from 0."""
        rows = [self.counts[prompt_id] for prompt_id in sorted(self.counts)]  # intervals do not depend on the prompts' order
        table = np.stack(rows) if rows else np.zeros(0, columns(self.num_positions))
        sums = {name: table[name].sum(axis=0) for name in table.dtype.names or ()}
        own = table["committed"][table["rounds"] > 0] / table["rounds"][table["rounds"] > 0]
        numbers = {
            # Accepted at a position, of those judged there and of all that drafted so far: the chance to get this far.
            "position_conditional": ratios(sums["kept"], sums["judged"]),
            "position_survival": ratios(sums["kept"], sums["not_cut_before"]),
            "accepted_histogram": [int(each) for each in sums["accepted_histogram"]],
            "drafted_histogram": [int(each) for each in sums["drafted_histogram"]],
            "overlap_alpha_by_position": ratios(sums["overlap"], sums["num_overlap"]),
            "num_tokens": int(sums["committed"]),
            "num_rounds": int(sums["rounds"]),
        }
        pairs = {name: (_by_prompt(table[above]), _by_prompt(table[below])) for name, (above, below) in RATIOS.items()}
        pairs["tokens_per_target_step_macro"] = (own, np.ones_like(own))
        return numbers | fields_of({name: ratio_interval(*pair) for name, pair in pairs.items()})


def count_rounds(generation: Generation, counts: Table, num_positions: int) -> None:
    """Add a generation's rounds, of which it has some, to the counts of its prompt."""
    rounds, positions_K = generation.rounds, np.arange(num_positions)
    drafted_R, nodes_R, accepted_R, committed_R = np.array(
        [(len(each.drafted), each.num_drafted, each.num_accepted, len(each.committed)) for each in rounds]
    ).T
    if drafted_R.max() > num_positions:
        raise ValueError(f"a round drafted {drafted_R.max()} tokens, more than {num_positions}")
    counts["committed"] += committed_R.sum()
    counts["rounds"] += len(rounds)
    counts["accepted"] += accepted_R.sum()
    counts["drafted"] += nodes_R.sum()
    counts["accepted_histogram"] += np.bincount(accepted_R, minlength=num_positions + 1)
    counts["drafted_histogram"] += np.bincount(drafted_R, minlength=num_positions + 1)
    kept_RK = accepted_R[:, None] > positions_K
    could_refuse_RK = (drafted_R[:, None] > positions_K) & (committed_R > accepted_R)[:, None]  # a cut round refused nothing
    counts["kept"] += kept_RK.sum(axis=0)
    counts["judged"] += (kept_RK | (could_refuse_RK & (accepted_R[:, None] == positions_K))).sum(axis=0)
    counts["not_cut_before"] += (kept_RK | could_refuse_RK).sum(axis=0)
    for name in COMPARED:
        for each in rounds:
            measured = getattr(each, name) or ()
            counts[name][: len(measured)] += measured
            counts[f"num_{name}"][: len(measured)] += 1


def _by_prompt(column: Floats) -> Floats:
    """Return a column's sums by prompt, `[P]`."""
    return column if column.ndim == 1 else column.sum(axis=1)


def ratios(above: Iterable[float], below: Iterable[float]) -> list[float | None]:
    """Return quotients, `None` where there is nothing to divide by."""
    return [float(one / other) if other else None for one, other in zip(above, below, strict=True)]


# --- a run ----------------------------------------------------------------------------------------------------------


class Tally:
    """The generations and timings of a suite, counted a batch of prompts at a time.

    A round may draft at most `num_positions` tokens, in some modes others. Memory grows with the prompts' tokens and timings,
    not with the rounds, which lie on disk (`records.jsonl`).
    """

    def __init__(self, num_positions: int, by_mode: Mapping[str, int] | None = None) -> None:
        self.num_positions, self.by_mode = num_positions, dict(by_mode or {})
        self.failed: list[Generation] = []
        self.timings: list[Timing] = []
        self.num_resumed = 0  # prompts that an earlier session of the run had measured
        self._acceptance: dict[str, Acceptance] = {}  # by mode
        self._category_of: dict[str, str] = {}  # by prompt id, of those decoded speculatively
        self._answers: dict[str, list[Generation]] = {AUTOREGRESSIVE: [], SPECULATIVE: []}  # by mode, without their rounds
        self._turns: dict[str, set[tuple[str, int]]] = {SPECULATIVE: set()}  # mode -> (prompt id, turn)

    def add(self, generations: Sequence[Generation], timings: Iterable[Timing] = ()) -> None:
        """Count prompts that were not counted before, all turns and modes of each; of repeated runs the first repeat."""
        place_of = {prompt_id: place for place, prompt_id in enumerate(dict.fromkeys(each.prompt_id for each in generations))}
        generations = sorted(generations, key=lambda each: (place_of[each.prompt_id], each.turn))
        for generation in generations:
            turns, turn = self._turns.setdefault(generation.mode, set()), (generation.prompt_id, generation.turn)
            if turn in turns:
                raise ValueError(
                    f"prompt {turn[0]} was decoded twice in mode {generation.mode}; hand in one repeat's generations"
                )
            turns.add(turn)
            acceptance = self._acceptance.setdefault(generation.mode, Acceptance(self.num_drafts(generation.mode)))
            acceptance.update([generation])
            if generation.mode == SPECULATIVE:
                self._category_of[generation.prompt_id] = generation.category
            self._answers.setdefault(generation.mode, []).append(replace(generation, rounds=()))
        self.failed += [generation for generation in generations if generation.stop_reason in FAILED]
        self.timings += timings

    def num_drafts(self, mode: str) -> int:
        """Return how many tokens a round of a mode may draft."""
        return self.by_mode.get(mode, self.num_positions)

    @property
    def modes(self) -> list[str]:
        """The modes that were decoded in, speculative decoding first."""
        return list(self._turns)

    @property
    def categories(self) -> dict[str, int]:
        """How many prompts of each category were decoded speculatively."""
        return dict(Counter(self._category_of.values()))

    @property
    def turns(self) -> set[tuple[str, int]]:
        """Every (prompt id, turn) that was decoded in any mode."""
        return {turn for turns in self._turns.values() for turn in turns}

    def of(self, mode: str) -> list[Generation]:
        """Return the answers of a mode, without their rounds."""
        return self._answers[mode]

    def acceptance(self, mode: str, category: str | None = None) -> Acceptance:
        """Return what a mode did on the prompts of one category, or on all."""
        whole = self._acceptance.get(mode, Acceptance(self.num_drafts(mode)))
        if category is None:
            return whole
        return whole.among({prompt_id for prompt_id, own in self._category_of.items() if own == category})

    def answered(self, asked: Collection[tuple[str, int]]) -> set[str]:
        """Return the prompts all of whose turns asked for were decoded in every mode without failing."""
        failed = {(each.prompt_id, each.turn) for each in self.failed}
        lacking = {turn[0] for turn in asked if turn in failed or any(turn not in decoded for decoded in self._turns.values())}
        return {prompt_id for prompt_id, _ in asked} - lacking

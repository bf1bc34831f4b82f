"""How many drafted tokens the target accepted, and how alike the two distributions are: the report's acceptance section.

Every number is made of sums over one table of counts, a row a prompt: counts add up over any split of the prompts, intervals
draw whole prompts. Ratios are formed once, of sums over all rounds: never a mean of ratios except where the name says `macro`.
One with nothing to divide by is `None`. Distributions are compared up to and including the first rejected draft of each round
(`eval.decoder.verifier`). P prompts, R rounds, K draft positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

from eval.decoder.records import AUTOREGRESSIVE, FAILED, SPECULATIVE, Generation, Round, Timing
from eval.stats import Floats, fields_of, ratio_interval

CONTEXT_FROM = (0, *(2**power for power in range(4, 18)))  # classes by how many tokens stood before a round
SAMPLES_A_SIDE = 3  # answers kept whole from either end of the ranking by tokens per target step
COMPARED = ("overlap", "kl", "agrees", "uncovered")  # by draft; a round may have the first without the others
# The numbers of the report that divide two columns' sums, and so have an interval over prompts.
RATIOS = {
    "tokens_per_target_step": ("committed", "rounds"),
    "accepted_per_round": ("accepted", "rounds"),
    "draft_token_yield": ("accepted", "drafted"),
    "overlap_alpha": ("overlap", "num_overlap"),
    "top1_agreement": ("agrees", "num_agrees"),
    "kl_divergence": ("kl", "num_kl"),
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
    shapes |= dict.fromkeys(("committed_by_context", "rounds_by_context"), (len(CONTEXT_FROM),))
    return np.dtype([(name, np.float64, shape) for name, shape in shapes.items()])


class Acceptance(Metric):
    """The acceptance of one mode's generations, whose rounds draft at most `num_positions` tokens.

    Combine processes with `merge`; `compute` never synchronises, because only the main process calls it.
    """

    full_state_update = False
    counts: list[Tensor]  # float64 [prompts of an update, fields of `columns`]

    def __init__(self, num_positions: int, generations: Iterable[Generation] = ()) -> None:
        super().__init__(sync_on_compute=False, compute_with_cache=False)
        self.num_positions, self.columns = num_positions, columns(num_positions)
        self.prompt_ids: list[str] = []
        self.add_state("counts", [], dist_reduce_fx="cat")
        self.update(generations)  # of none, too: torchmetrics warns of one that only merged

    def update(self, generations: Iterable[Generation]) -> None:
        """Count generations of prompts that were not counted before, all turns of each."""
        found: dict[str, Table] = {}
        for generation in generations:
            counts = found.setdefault(generation.prompt_id, np.zeros((), self.columns))
            if generation.rounds:
                count_rounds(generation, counts, self.num_positions)
        self.prompt_ids += found
        if found:
            self.counts.append(torch.from_numpy(np.stack(list(found.values())).view(np.float64).reshape(len(found), -1)))

    def merge(self, other: Acceptance) -> None:
        """Add what another process, or another category, has counted of other prompts."""
        self.counts += other.counts
        self.prompt_ids += other.prompt_ids

    @property
    def table(self) -> Table:
        """The counts by prompt id, so that intervals do not depend on the order in which processes finished."""
        rows = torch.cat([torch.zeros(0, self.columns.itemsize // 8, dtype=torch.float64), *self.counts])
        return rows.numpy()[np.argsort(self.prompt_ids)].view(self.columns)[:, 0]

    @property
    def per_prompt(self) -> dict[str, list[int]]:
        """`{prompt id: [committed tokens, rounds]}`, with which a later report is compared prompt by prompt."""
        rows = zip(sorted(self.prompt_ids), self.table, strict=True)
        return {prompt_id: [int(row["committed"]), int(row["rounds"])] for prompt_id, row in rows}

    def compute(self) -> dict[str, Any]:
        """Return the report's lists by draft position or by length, from 0."""
        sums = {name: self.table[name].sum(axis=0) for name in self.columns.names or ()}
        return {
            # Accepted at a position, of those judged there and of all that drafted so far: the chance to get this far.
            "position_conditional": ratios(sums["kept"], sums["judged"]),
            "position_survival": ratios(sums["kept"], sums["not_cut_before"]),
            "accepted_histogram": [int(each) for each in sums["accepted_histogram"]],
            "drafted_histogram": [int(each) for each in sums["drafted_histogram"]],
            "overlap_alpha_by_position": ratios(sums["overlap"], sums["num_overlap"]),
        }

    def summarise(self, *, samples: int, seed: int) -> dict[str, Any]:
        """Return every number, with intervals from `samples` bootstrap resamples of the prompts."""
        table = self.table
        own = table["committed"][table["rounds"] > 0] / table["rounds"][table["rounds"] > 0]
        numbers = {
            **self.compute(),
            "num_tokens": int(table["committed"].sum()),
            "num_rounds": int(table["rounds"].sum()),
        }
        pairs = {name: (_by_prompt(table[above]), _by_prompt(table[below])) for name, (above, below) in RATIOS.items()}
        pairs["tokens_per_target_step_macro"] = (own, np.ones_like(own))
        return numbers | fields_of({name: ratio_interval(*pair, samples=samples, seed=seed) for name, pair in pairs.items()})

    def by_context(self, *, samples: int, seed: int) -> list[dict[str, Any]]:
        """Return tokens per target step by how many tokens of prompt and answer stood before a round."""
        found = []
        for place, start in enumerate(CONTEXT_FROM):
            committed_P, rounds_P = (self.table[f"{name}_by_context"][:, place] for name in ("committed", "rounds"))
            if rounds_P.any():
                tau = ratio_interval(committed_P, rounds_P, samples=samples, seed=seed)
                part = {
                    "from_tokens": start,
                    "to_tokens": 2 * start if start else CONTEXT_FROM[1],
                    "num_prompts": int((rounds_P > 0).sum()),
                    "num_rounds": int(rounds_P.sum()),
                }
                found.append(part | fields_of({"tokens_per_target_step": tau}))
        return found


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
        values_RK = _measured(rounds, name, num_positions)
        counts[name] += np.nansum(values_RK, axis=0)
        counts[f"num_{name}"] += (~np.isnan(values_RK)).sum(axis=0)
    # The answer's first token came from the prompt's own forward.
    before_R = len(generation.prompt_tokens) + np.array(list(accumulate(committed_R, initial=1))[:-1])
    class_R = np.searchsorted(CONTEXT_FROM, before_R, side="right") - 1
    counts["committed_by_context"] += np.bincount(class_R, committed_R, minlength=len(CONTEXT_FROM))
    counts["rounds_by_context"] += np.bincount(class_R, minlength=len(CONTEXT_FROM))


def _measured(rounds: Sequence[Round], name: str, num_positions: int) -> Floats:
    """Return a number of `COMPARED` by round and position, `[R, K]`; NaN where it was not recorded."""
    values_RK = np.full((len(rounds), num_positions), np.nan)
    for values_K, each in zip(values_RK, rounds, strict=True):
        measured = getattr(each if name == "overlap" else each.distributions, name, None) or ()
        values_K[: len(measured)] = measured
    return values_RK


def _by_prompt(column: Floats) -> Floats:
    """Return a column's sums by prompt, `[P]`."""
    return column if column.ndim == 1 else column.sum(axis=1)


def ratios(above: Iterable[float], below: Iterable[float]) -> list[float | None]:
    """Return quotients, `None` where there is nothing to divide by."""
    return [float(one / other) if other else None for one, other in zip(above, below, strict=True)]


# --- a run ----------------------------------------------------------------------------------------------------------


class Tally:
    """The generations and timings of a run, counted a few prompts at a time.

    A round may draft at most `num_positions` tokens, in some modes others. Each process keeps a tally and the main one merges
    them, so that any number of processes gives the numbers of one. Memory grows with the prompts' tokens and timings, not with
    the rounds, which lie on disk (`eval.measure.record_files`).
    """

    def __init__(self, num_positions: int, by_mode: Mapping[str, int] | None = None) -> None:
        self.num_positions, self.by_mode = num_positions, dict(by_mode or {})
        self.failed: list[Generation] = []
        self.samples: list[Generation] = []  # speculative ones, whole
        self.timings: list[Timing] = []
        self.num_resumed = 0  # prompts that an earlier session of the run had measured
        self._shares: dict[tuple[str, str], Acceptance] = {}  # (mode, category) -> numbers
        self._answers: dict[str, list[Generation]] = {AUTOREGRESSIVE: [], SPECULATIVE: []}  # without their rounds
        self._turns: dict[str, set[tuple[str, int]]] = {SPECULATIVE: set()}  # mode -> (prompt id, turn)

    def add(self, generations: Sequence[Generation], timings: Iterable[Timing] = ()) -> None:
        """Count prompts that were not counted before, all turns and modes of each; of repeated runs the first repeat."""
        shares: dict[tuple[str, str], list[Generation]] = {}
        for generation in generations:
            self._note(generation.mode, {(generation.prompt_id, generation.turn)})
            shares.setdefault((generation.mode, generation.category), []).append(generation)
            if generation.mode in self._answers:
                self._answers[generation.mode].append(replace(generation, rounds=()))
        for key, own in shares.items():
            self._share(key).update(own)
        self.failed += [generation for generation in generations if generation.stop_reason in FAILED]
        self._keep_samples([generation for generation in generations if generation.mode == SPECULATIVE])
        self.timings += timings

    def merge(self, other: Tally) -> None:
        """Add what another process counted of other prompts."""
        for mode, turns in other._turns.items():
            self._note(mode, turns)
        for key, share in other._shares.items():
            self._share(key).merge(share)
        for mode, answers in other._answers.items():
            self._answers[mode] += answers
        self.failed += other.failed
        self.timings += other.timings
        self.num_resumed += other.num_resumed
        self._keep_samples(other.samples)

    def sort(self, prompt_ids: Sequence[str]) -> None:
        """Bring everything into the order of the prompts, whichever process decoded them."""
        place_of = {prompt_id: place for place, prompt_id in enumerate(prompt_ids)}
        self.timings.sort(key=lambda each: place_of[each.prompt_ids[0]])  # stable: turns and repeats stay as they came
        for answers in (self.failed, *self._answers.values()):
            answers.sort(key=lambda each: (place_of[each.prompt_id], each.turn))
        first_of = {key: min(map(place_of.__getitem__, share.prompt_ids)) for key, share in self._shares.items()}
        self._shares = dict(sorted(self._shares.items(), key=lambda item: first_of[item[0]]))

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
        return {category: len(share.prompt_ids) for (mode, category), share in self._shares.items() if mode == SPECULATIVE}

    @property
    def turns(self) -> set[tuple[str, int]]:
        """Every (prompt id, turn) that was decoded in any mode."""
        return {turn for turns in self._turns.values() for turn in turns}

    def of(self, mode: str) -> list[Generation]:
        """Return the plain or the speculative answers, without their rounds."""
        return self._answers[mode]

    def acceptance(self, mode: str, category: str | None = None) -> Acceptance:
        """Return what a mode did on the prompts of one category, or on all."""
        whole = Acceptance(self.num_drafts(mode))
        for (own_mode, own_category), share in self._shares.items():
            if own_mode == mode and category in (None, own_category):
                whole.merge(share)
        return whole

    def answered(self, asked: Collection[tuple[str, int]]) -> set[str]:
        """Return the prompts all of whose turns asked for were decoded in every mode without failing."""
        failed = {(each.prompt_id, each.turn) for each in self.failed}
        lacking = {turn[0] for turn in asked if turn in failed or any(turn not in decoded for decoded in self._turns.values())}
        return {prompt_id for prompt_id, _ in asked} - lacking

    def _share(self, key: tuple[str, str]) -> Acceptance:
        if key not in self._shares:  # not `setdefault`: making one takes longer than counting a prompt
            self._shares[key] = Acceptance(self.num_drafts(key[0]))
        return self._shares[key]

    def _note(self, mode: str, turns: set[tuple[str, int]]) -> None:
        known = self._turns.setdefault(mode, set())
        if twice := known & turns:
            raise ValueError(f"prompt {min(twice)[0]} was decoded twice in mode {mode}; hand in the generations of one repeat")
        known |= turns

    def _keep_samples(self, generations: Sequence[Generation]) -> None:
        """Keep the answers at both ends of the ranking; which ones does not depend on the order they come in."""
        ranked = sorted(
            (each for each in (*self.samples, *generations) if each.rounds),
            key=lambda each: (each.num_committed / len(each.rounds), each.prompt_id, each.turn),
        )
        del ranked[SAMPLES_A_SIDE : max(SAMPLES_A_SIDE, len(ranked) - SAMPLES_A_SIDE)]
        self.samples = ranked

"""How many drafted tokens the target accepted, and how alike the two distributions are: the report's acceptance section.

Every number is made of sums over one table of counts, a row a prompt: counts add up over any split of the prompts, intervals
draw whole prompts. Ratios are formed once, of sums over all rounds: never a mean of ratios except where the name says `macro`.
One with nothing to divide by is `None`. Distributions are compared up to and including the first rejected draft of each round
(`eval.decoder.verifier`). P prompts, R rounds, K draft positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

from eval.decoder.records import Generation, Round
from eval.stats.bootstrap import Floats, ratio_interval

CONTEXT_FROM = (0, *(2**power for power in range(4, 18)))  # classes by how many tokens stood before a round
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
        for name, (above_P, below_P) in pairs.items():
            found = ratio_interval(above_P, below_P, samples=samples, seed=seed)
            numbers |= {name: found.point, f"{name}_ci": found.bounds}
        return numbers

    def by_context(self, *, samples: int, seed: int) -> list[dict[str, Any]]:
        """Return tokens per target step by how many tokens of prompt and answer stood before a round."""
        found = []
        for place, start in enumerate(CONTEXT_FROM):
            committed_P, rounds_P = (self.table[f"{name}_by_context"][:, place] for name in ("committed", "rounds"))
            if rounds_P.any():
                tau = ratio_interval(committed_P, rounds_P, samples=samples, seed=seed)
                found.append(
                    {
                        "from_tokens": start,
                        "to_tokens": 2 * start if start else CONTEXT_FROM[1],
                        "num_prompts": int((rounds_P > 0).sum()),
                        "num_rounds": int(rounds_P.sum()),
                        "tokens_per_target_step": tau.point,
                        "tokens_per_target_step_ci": tau.bounds,
                    }
                )
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

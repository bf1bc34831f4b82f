"""How many drafted tokens the target accepted, and how alike the two distributions are: the report's acceptance section.

Counts add up over any split of the prompts over processes; a few are kept by prompt, for the intervals. Ratios are formed once,
from counts over all rounds: never a mean of ratios except where the name says `macro`. A ratio with nothing to divide by is
`None`. Distributions are compared up to and including the first rejected draft of each round (`eval.decoder.verifier`).
R rounds, C whether the end of the text cut the round (0 no, 1 yes) or classes of confidence, G number drafted, A number
accepted, K draft positions, N compared drafts, P prompts, F rows of sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from eval.decoder.records import DistributionComparison, Generation
from eval.stats.bootstrap import Floats, ratio_interval

# What is kept of each prompt: sums over the rounds of all its turns.
COLUMNS = (
    *("committed", "rounds", "accepted", "drafted", "looked_up", "copied"),
    *("overlap", "overlapped", "kl", "agrees", "compared"),  # a round may have overlaps without the rest
    *("thought", "thinking_rounds"),  # committed tokens and rounds, of rounds that began inside the thinking
)
# Then come committed tokens and rounds by class of how many tokens of prompt and answer stood before the round.
CLASSES_FROM = (0, *(2**power for power in range(4, 18)))
# The numbers that are a ratio of two of these, and so have an interval over prompts.
RATIOS = {
    "tokens_per_target_step": ("committed", "rounds"),
    "accepted_per_round": ("accepted", "rounds"),
    "draft_token_yield": ("accepted", "drafted"),
    "overlap_alpha": ("overlap", "overlapped"),
    "top1_agreement": ("agrees", "compared"),
    "kl_divergence": ("kl", "compared"),
}
FIELDS = {"overlap": "overlap_alpha", "agrees": "top1_agreement", "kl": "kl_divergence", "uncovered": "uncovered_mass"}
# What is calibrated, by the prefix of its numbers: the draft's probability of its drafted token against the target's, exact in
# place of an outcome (0 for a draft equal to the target); the distribution's largest probability, which stopping rules read;
# the draft's own estimate. The error is by the first outcome.
CALIBRATIONS = {
    "": ("confidence", ("target_probability", "accepted")),
    "stopping_": ("distribution_confidence", ("accepted",)),
    "estimate_": ("estimate", ("accepted",)),
}
COMPARED = ("overlap", *(field.name for field in fields(DistributionComparison)))  # the rows of `RoundTable.probs_FN`
NUM_CLASSES, FINE = 10, 1000  # of confidence, equally wide; for the curve, and for the area under the ROC curve


class Acceptance(Metric):
    """The acceptance of one mode's generations, whose rounds draft at most `num_positions` tokens.

    Processes agree by `merge`: to wait for others at `compute` would be for ever in the main one.
    """

    full_state_update = False
    rounds_CGA: Tensor
    sum_FK: Tensor
    count_FK: Tensor
    fine_FC: Tensor

    def __init__(self, num_positions: int, generations: Iterable[Generation] = ()) -> None:
        super().__init__(sync_on_compute=False, compute_with_cache=False)
        self.num_positions = num_positions
        self.sums: dict[str, Floats] = {}  # prompt id -> [COLUMNS, then CLASSES_FROM x 2]
        shapes = {
            "rounds_CGA": (2, num_positions + 1, num_positions + 1),
            "sum_FK": (len(FIELDS), num_positions),
            "count_FK": (len(FIELDS), num_positions),
            "fine_FC": (3, FINE),
        }
        shapes |= {f"{prefix}sums_FC": (2 + len(outcomes), NUM_CLASSES) for prefix, (_, outcomes) in CALIBRATIONS.items()}
        for name, shape in shapes.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.update(generations)  # of none, too: torchmetrics warns of one that only merged

    def update(self, generations: Iterable[Generation]) -> None:
        """Count generations of prompts that were not counted before, all turns of each."""
        table, size = tabulate(generations), self.num_positions + 1
        if (table.drafted_R >= size).any():
            raise ValueError(f"a round drafted {int(table.drafted_R.max())} tokens, more than {self.num_positions}")
        cut_R = table.committed_R == table.accepted_R
        cells_R = (cut_R * size + table.drafted_R) * size + table.accepted_R
        self.rounds_CGA += torch.bincount(cells_R, minlength=2 * size * size).view(2, size, size)
        for row, name in enumerate(FIELDS):
            values_N = table.number_of(name)
            known_N = ~values_N.isnan()
            positions = table.position_N[known_N]
            self.sum_FK[row] += torch.bincount(positions, values_N[known_N], minlength=self.num_positions)
            self.count_FK[row] += torch.bincount(positions, minlength=self.num_positions)
        for prefix, (confidence, outcomes) in CALIBRATIONS.items():
            values_FN = torch.stack([table.number_of(name) for name in (confidence, *outcomes)])
            values_FN = values_FN[:, ~values_FN.isnan().any(0)]
            getattr(self, f"{prefix}sums_FC").add_(class_sums(*values_FN))
            if confidence == "estimate":
                self.fine_FC += class_sums(*values_FN, num_classes=FINE)
        self.sums.update(zip(table.prompt_ids, _sums_by_prompt(table), strict=True))

    def merge(self, other: Acceptance) -> None:
        """Add what another process, or another category, has counted of other prompts."""
        self.merge_state(other)
        self.sums.update(other.sums)

    def compute(self) -> dict[str, Any]:
        """Return the report's lists by draft position or by length, from 0, and the numbers of the two distributions.

        A position is judged when every draft before it was accepted and the text had not ended. Drafts behind an accepted end
        of text count as drafted (they cost time) but not as judged: nobody knows whether they would have been accepted. Of a
        tree those on the way that was walked count; its yield counts all.
        """
        positions = range(self.num_positions)
        rounds_GA = self.rounds_CGA.sum(0).long()
        numbers: dict[str, Any] = {
            # Accepted at a position, of those judged there and of all that drafted so far: the chance to get this far.
            "position_conditional": [self._accepted(position, position) for position in positions],
            "position_survival": [self._accepted(position, 0) for position in positions],
            "accepted_histogram": rounds_GA.sum(0).tolist(),
            "drafted_histogram": rounds_GA.sum(1).tolist(),
        }
        for name, sum_K, count_K in zip(FIELDS.values(), self.sum_FK, self.count_FK, strict=True):
            numbers[name] = ratio(sum_K.sum(), count_K.sum())
            numbers[f"{name}_by_position"] = [ratio(*pair) for pair in zip(sum_K, count_K, strict=True)]
        for prefix, (_, outcomes) in CALIBRATIONS.items():
            sums_FC = getattr(self, f"{prefix}sums_FC")
            # sum over classes of n/N |mean confidence - mean outcome| (Guo et al., 1706.04599, equation 3)
            numbers[f"{prefix}calibration_error"] = ratio((sums_FC[1] - sums_FC[2]).abs().sum(), sums_FC[0].sum())
            numbers[f"{prefix}reliability"] = describe_classes(sums_FC, outcomes)
        # The chance that of a kept draft and a refused one the first has the higher estimate; equal ones count half.
        kept_C = self.fine_FC[2]
        refused_C = self.fine_FC[0] - kept_C
        below_C = refused_C.cumsum(0) - refused_C / 2
        numbers["estimate_auroc"] = ratio((kept_C * below_C).sum(), kept_C.sum() * refused_C.sum())
        if not self.fine_FC.any():
            numbers["estimate_reliability"] = []
        return numbers

    def _accepted(self, position: int, from_accepted: int) -> float | None:
        """Return accepted at `position` / rounds that drafted past it, kept `from_accepted` at least, uncut before."""
        whole_GA, cut_GA = self.rounds_CGA[:, position + 1 :]
        accepted = whole_GA[:, position + 1 :].sum() + cut_GA[:, position + 1 :].sum()
        refused = whole_GA[:, from_accepted : position + 1].sum()  # a cut round refused nothing
        return ratio(accepted, accepted + refused)

    @property
    def per_prompt(self) -> dict[str, list[int]]:
        """`{prompt id: [committed tokens, rounds]}`, with which a later report is compared prompt by prompt."""
        return {prompt_id: [int(sums[0]), int(sums[1])] for prompt_id, sums in sorted(self.sums.items())}

    @property
    def _table(self) -> Floats:
        """The sums of all prompts, by id, so that intervals do not depend on the order in which processes finished."""
        rows = [sums for _, sums in sorted(self.sums.items())]
        return np.stack(rows) if rows else np.zeros((0, len(COLUMNS) + 2 * len(CLASSES_FROM)))

    def lookup_shares(self) -> dict[str, float | None]:
        """Return the lookup's share of the rounds, and of the drafts that were accepted."""
        sums = dict(zip(COLUMNS, self._table.sum(0), strict=False))
        pairs = {"lookup_rounds_share": ("looked_up", "rounds"), "lookup_tokens_share": ("copied", "accepted")}
        return {name: float(sums[above] / sums[below]) if sums[below] else None for name, (above, below) in pairs.items()}

    def by_thinking(self, *, samples: int, seed: int) -> dict[str, dict[str, Any]]:
        """Return tokens per target step inside and outside of the thinking; nothing where no round began inside."""
        column = dict(zip(COLUMNS, self._table.T, strict=False))
        inside = column["thought"], column["thinking_rounds"]
        outside = column["committed"] - inside[0], column["rounds"] - inside[1]
        if not inside[1].any():
            return {}
        return {name: _part(*each, samples, seed) for name, each in (("inside", inside), ("outside", outside)) if each[1].any()}

    def by_context(self, *, samples: int, seed: int) -> list[dict[str, Any]]:
        """Return tokens per target step by how many tokens of prompt and answer stood before a round."""
        counts_C2P = self._table[:, len(COLUMNS) :].reshape(-1, len(CLASSES_FROM), 2).transpose(1, 2, 0)
        found = []
        for start, (committed_P, rounds_P) in zip(CLASSES_FROM, counts_C2P, strict=True):
            if not rounds_P.any():
                continue
            bounds = {"from_tokens": start, "to_tokens": 2 * start if start else CLASSES_FROM[1]}
            found.append(bounds | _part(committed_P, rounds_P, samples, seed))
        return found

    def summarise(self, *, samples: int, seed: int) -> dict[str, Any]:
        """Return every number, with intervals from `samples` bootstrap resamples of the prompts."""
        column = dict(zip(COLUMNS, self._table.T, strict=False))
        decoded = column["rounds"] > 0
        own = column["committed"][decoded] / column["rounds"][decoded]
        macro = ratio_interval(own, np.ones_like(own), samples=samples, seed=seed)
        numbers = {
            **self.compute(),
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


# --- sums ---------------------------------------------------------------------------------------------------------


def ratio(numerator: Tensor, denominator: Tensor) -> float | None:
    """Return a quotient as a number, `None` where there is nothing to divide by."""
    return numerator.item() / denominator.item() if denominator.item() else None


def class_sums(confidence_N: Tensor, *values: Tensor, num_classes: int = NUM_CLASSES) -> Tensor:
    """Return sums by class, float64 `[2 + F, C]`: how many drafts, their confidences, and each of the `values` `[N]`."""
    class_N = (confidence_N * num_classes).long().clamp(0, num_classes - 1)
    columns = [torch.ones_like(confidence_N), confidence_N, *values]
    return torch.stack([torch.bincount(class_N, each.double(), minlength=num_classes) for each in columns])


def describe_classes(sums_FC: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one dict a class of `class_sums`: bounds, `num_drafts`, and the means, which are `None` without drafts."""
    return [
        {
            "confidence_from": number / sums_FC.shape[1],
            "confidence_to": (number + 1) / sums_FC.shape[1],
            "num_drafts": int(count),
            **{name: ratio(each, count) for name, each in zip(("confidence", *names), others, strict=True)},
        }
        for number, (count, *others) in enumerate(sums_FC.unbind(1))
    ]


def _part(committed_P: Floats, rounds_P: Floats, samples: int, seed: int) -> dict[str, Any]:
    """Return tokens per target step of a part of the rounds, by prompt."""
    tau = ratio_interval(committed_P, rounds_P, samples=samples, seed=seed)
    return {
        "num_prompts": int((rounds_P > 0).sum()),
        "num_rounds": int(rounds_P.sum()),
        "tokens_per_target_step": tau.point,
        "tokens_per_target_step_ci": tau.bounds,
    }


def _sums_by_prompt(table: RoundTable) -> Floats:
    """Return the sums of `COLUMNS`, and of what follows them, by prompt, `[P, COLUMNS + CLASSES_FROM x 2]`."""
    by_round = {
        "committed": table.committed_R,
        "rounds": torch.ones_like(table.prompt_R),
        "accepted": table.accepted_R,
        "drafted": table.judged_R,
        "looked_up": table.by_lookup_R,
        "copied": table.accepted_R * table.by_lookup_R,
        "thought": table.committed_R * table.thinking_R,
        "thinking_rounds": table.thinking_R,
    }
    by_draft = {name: table.number_of(name).nan_to_num(0.0) for name in ("overlap", "kl", "agrees")}
    by_draft["overlapped"] = torch.ones_like(by_draft["overlap"])
    by_draft["compared"] = (~table.number_of("kl").isnan()).double()
    num_prompts, num_classes = len(table.prompt_ids), len(CLASSES_FROM)
    places = [(by_round, table.prompt_R), (by_draft, table.prompt_R[table.round_N])]
    sums = {
        name: torch.bincount(prompt, values.double(), minlength=num_prompts)
        for columns, prompt in places
        for name, values in columns.items()
    }
    class_R = torch.bucketize(table.context_R, torch.tensor(CLASSES_FROM), right=True) - 1
    place_R = table.prompt_R * num_classes + class_R
    counts = [
        torch.bincount(place_R, by_round[name].double(), minlength=num_prompts * num_classes)
        for name in ("committed", "rounds")
    ]
    by_class = torch.stack(counts, 1).view(num_prompts, 2 * num_classes)
    rows: Floats = torch.cat([torch.stack([sums[name] for name in COLUMNS], 1), by_class], 1).numpy()
    return rows


# --- rounds as columns: one pass in Python, after which every number is a few tensor operations --------------------


@dataclass(frozen=True, kw_only=True)
class RoundTable:
    """The rounds of some generations, in order; counts are int64."""

    prompt_ids: tuple[str, ...]  # [P], in the order in which they first come
    prompt_R: Tensor  # place of the round's prompt in `prompt_ids`; all turns of a prompt share one
    drafted_R: Tensor  # of a tree, on the way that was walked
    judged_R: Tensor  # of a tree, all its nodes
    accepted_R: Tensor
    committed_R: Tensor
    context_R: Tensor  # tokens before the round's, the prompt's and the answer's
    thinking_R: Tensor  # 1 where the round began inside the thinking
    by_lookup_R: Tensor  # 1 where the drafts of one of several proposers were looked up
    round_N: Tensor
    position_N: Tensor  # of the draft in its round, from 0
    probs_FN: Tensor  # float64; NaN where a number was not recorded

    def number_of(self, name: str) -> Tensor:
        """Return a number of `COMPARED`, or whether the target kept the draft (`accepted`), `[N]` in float64."""
        if name == "accepted":
            return (self.position_N < self.accepted_R[self.round_N]).double()
        return self.probs_FN[COMPARED.index(name)]


def tabulate(generations: Iterable[Generation]) -> RoundTable:
    """Return the rounds of some generations, of one mode."""
    generations = list(generations)
    place_of = {prompt_id: place for place, prompt_id in enumerate(dict.fromkeys(each.prompt_id for each in generations))}
    rounds = [round_ for generation in generations for round_ in generation.rounds]
    # Before each round of a generation; the answer's first token came from the prompt's own forward.
    answered = [
        list(accumulate((len(round_.committed) for round_ in each.rounds), initial=1))[: len(each.rounds)]
        for each in generations
    ]
    places = [(number, place) for number, round_ in enumerate(rounds) for place in range(len(round_.overlap or ()))]
    columns: dict[str, list[float]] = {name: [] for name in COMPARED}
    for round_ in rounds:
        for name, column in columns.items():
            source = round_ if name == "overlap" else round_.distributions
            values = getattr(source, name, ())
            column += values or (float("nan"),) * len(round_.overlap or ())
    return RoundTable(
        prompt_ids=tuple(place_of),
        prompt_R=_integers(place_of[each.prompt_id] for each in generations for _ in each.rounds),
        drafted_R=_integers(len(round_.drafted) for round_ in rounds),
        judged_R=_integers(round_.num_drafted for round_ in rounds),
        accepted_R=_integers(round_.num_accepted for round_ in rounds),
        committed_R=_integers(len(round_.committed) for round_ in rounds),
        context_R=_integers(
            len(each.prompt_tokens) + count for each, own in zip(generations, answered, strict=True) for count in own
        ),
        thinking_R=_integers(
            count < each.num_thinking for each, own in zip(generations, answered, strict=True) for count in own
        ),
        by_lookup_R=_integers(round_.by_lookup for round_ in rounds),
        round_N=_integers(number for number, _ in places),
        position_N=_integers(place for _, place in places),
        probs_FN=torch.from_numpy(np.array(list(columns.values()), np.float64).reshape(len(COMPARED), -1)),
    )


def _integers(values: Iterable[int]) -> Tensor:
    return torch.from_numpy(np.fromiter(values, np.int64))

"""Acceptance metrics with sum and count states: any number of ranks, in any split of the prompts, agree on one answer.

Each metric takes the rounds of whole prompts (`eval.round_table`), some at a time or none, and computes a dict whose keys are
fields of the report (`eval.definitions` says in a sentence what each means). Ratios are formed once, at the end, from counts
over all rounds: never a mean of ratios except where the name says `macro`. A ratio with nothing to divide by is `None`.
How alike the two laws are, measured from the logits, is in `eval.law_metrics`.

Left out: intervals, which need the counts prompt by prompt (`eval.acceptance`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from eval.law_metrics import Calibration, LawAgreement, StoppingCalibration
from eval.records import Generation, Round
from eval.reliability import ratio
from eval.round_table import RoundTable

# Shapes: R rounds, C whether the end of the text cut the round (0 no, 1 yes), G number drafted, A number accepted.


def acceptance_metrics(num_positions: int, **settings: Any) -> MetricCollection:
    """Return all metrics of this file and of `eval.law_metrics` as one; `compute()` gives one flat dict.

    Args:
        num_positions: the most tokens a round may draft.
        settings: torchmetrics' own, such as `sync_on_compute`.
    """
    metrics: list[Metric | MetricCollection] = [
        TokensPerTargetStep(**settings),
        RoundAcceptance(num_positions, **settings),
        LawAgreement(num_positions, **settings),
        Calibration(**settings),
        StoppingCalibration(**settings),
    ]
    return MetricCollection(metrics, compute_groups=False)


def count_committed(generation: Generation) -> int:
    """Return how many tokens the rounds of a generation committed; its prefill token is not among them."""
    return sum(len(round_.committed) for round_ in generation.rounds)


def was_cut(round_: Round) -> bool:
    """Say whether an accepted token ended the text, so that what was drafted behind it was never judged."""
    return len(round_.committed) == round_.num_accepted


class TokensPerTargetStep(Metric):
    """Committed tokens a target decode forward: tau, pooled over rounds, and as the mean of the prompts' own values."""

    full_state_update = False
    committed: Tensor
    rounds: Tensor
    prompt_ratios: Tensor
    prompts: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in ("committed", "rounds", "prompts"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("prompt_ratios", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, table: RoundTable) -> None:
        """Count some prompts, each with all its turns. One that took no decode forward has no ratio."""
        rounds_P = table.sum_by_prompt(torch.ones_like(table.prompt_R), table.prompt_R)
        committed_P = table.sum_by_prompt(table.committed_R, table.prompt_R)
        decoded_P = rounds_P > 0
        self.committed += table.committed_R.sum().to(self.committed)
        self.rounds += len(table.committed_R)
        self.prompt_ratios += (committed_P[decoded_P] / rounds_P[decoded_P]).sum().to(self.prompt_ratios)
        self.prompts += decoded_P.sum().to(self.prompts)

    def compute(self) -> dict[str, float | int | None]:
        """Return `tokens_per_target_step`, its `_macro` variant and the two counts."""
        return {
            "tokens_per_target_step": ratio(self.committed, self.rounds),
            "tokens_per_target_step_macro": ratio(self.prompt_ratios, self.prompts),
            "num_tokens": int(self.committed),
            "num_rounds": int(self.rounds),
        }


class RoundAcceptance(Metric):
    """What became of the drafted tokens, all of it read from one table of rounds by (cut, drafted, accepted).

    A position is judged when every draft before it was accepted and the text had not ended. Drafts behind an accepted end
    of text count as drafted (they cost time) but not as judged: nobody knows whether they would have been accepted. The
    drafts of a tree count in its yield all, and elsewhere those on the way that was walked.
    """

    full_state_update = False
    rounds_CGA: Tensor
    drafts: Tensor

    def __init__(self, num_positions: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.num_positions = num_positions
        size = num_positions + 1
        self.add_state("rounds_CGA", torch.zeros((2, size, size), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("drafts", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

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
        self.drafts += table.judged_R.sum().to(self.drafts)

    def compute(self) -> dict[str, float | list[int] | list[float | None] | None]:
        """Return the report's fields on accepted and drafted tokens; lists go by draft position or by length, from 0."""
        lengths = torch.arange(self.num_positions + 1, device=self.rounds_CGA.device)
        rounds_GA = self.rounds_CGA.sum(0)
        drafted_G, accepted_A = rounds_GA.sum(1), rounds_GA.sum(0)
        num_accepted = (accepted_A * lengths).sum()
        return {
            "accepted_per_round": ratio(num_accepted, rounds_GA.sum()),
            "draft_token_yield": ratio(num_accepted, self.drafts),
            "position_conditional": [self._conditional(position) for position in range(self.num_positions)],
            "position_survival": [self._survival(position) for position in range(self.num_positions)],
            "accepted_histogram": accepted_A.tolist(),
            "drafted_histogram": drafted_G.tolist(),
        }

    def _conditional(self, position: int) -> float | None:
        """Return accepted at `position` / judged there."""
        accepted, reached = self._accepted_and_drafted(position, from_accepted=position)
        return ratio(accepted, reached)

    def _survival(self, position: int) -> float | None:
        """Return accepted at `position` / drafted so far and not cut before: the chance that a draft gets this far."""
        accepted, drafted = self._accepted_and_drafted(position, from_accepted=0)
        return ratio(accepted, drafted)

    def _accepted_and_drafted(self, position: int, *, from_accepted: int) -> tuple[Tensor, Tensor]:
        """Count rounds that drafted past `position`: those accepted there, and all that had at least `from_accepted`."""
        whole_GA, cut_GA = self.rounds_CGA[:, position + 1 :]
        accepted = whole_GA[:, position + 1 :].sum() + cut_GA[:, position + 1 :].sum()
        refused = whole_GA[:, from_accepted : position + 1].sum()  # a cut round refused nothing
        return accepted, accepted + refused

"""Acceptance metrics with sum and count states: any number of ranks, in any split of the prompts, agree on one answer.

Each metric takes whole generations, some at a time or none, and computes a dict whose keys are fields of the report
(`eval.definitions` says in a sentence what each means). Ratios are formed once, at the end, from counts over all rounds:
never a mean of ratios except where the name says `macro`. A ratio with nothing to divide by is `None`.

Left out: intervals, which need the counts prompt by prompt (`eval.acceptance`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from eval.records import Generation, Round

# Shapes: C whether the end of the text cut the round (0 no, 1 yes), G number drafted, A number accepted, K draft position.


def acceptance_metrics(num_positions: int) -> MetricCollection:
    """Return all metrics of this file as one; `compute()` gives one flat dict.

    Args:
        num_positions: the most tokens a round may draft.
    """
    metrics: list[Metric | MetricCollection] = [
        TokensPerTargetStep(),
        RoundAcceptance(num_positions),
        OverlapAlpha(num_positions),
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

    def __init__(self) -> None:
        super().__init__()
        for name in ("committed", "rounds", "prompts"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("prompt_ratios", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, generations: Sequence[Generation]) -> None:
        """Count some prompts. One whose answer ended with the prefill token took no decode forward and has no ratio."""
        counts = [(count_committed(generation), len(generation.rounds)) for generation in generations if generation.rounds]
        self.committed += sum(committed for committed, _ in counts)
        self.rounds += sum(rounds for _, rounds in counts)
        self.prompt_ratios += sum(committed / rounds for committed, rounds in counts)
        self.prompts += len(counts)

    def compute(self) -> dict[str, float | int | None]:
        """Return `tokens_per_target_step`, its `_macro` variant and the two counts."""
        return {
            "tokens_per_target_step": _ratio(self.committed, self.rounds),
            "tokens_per_target_step_macro": _ratio(self.prompt_ratios, self.prompts),
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

    def __init__(self, num_positions: int) -> None:
        super().__init__()
        self.num_positions = num_positions
        size = num_positions + 1
        self.add_state("rounds_CGA", torch.zeros((2, size, size), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("drafts", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, generations: Sequence[Generation]) -> None:
        """Count the rounds of some prompts.

        Raises:
            ValueError: a round drafted more than `num_positions` tokens.
        """
        size = self.num_positions + 1
        cells = []
        for round_ in (round_ for generation in generations for round_ in generation.rounds):
            if len(round_.drafted) > self.num_positions:
                raise ValueError(f"a round drafted {len(round_.drafted)} tokens, more than num_positions={self.num_positions}")
            self.drafts += round_.num_drafted
            cells.append((was_cut(round_) * size + len(round_.drafted)) * size + round_.num_accepted)
        counts = torch.bincount(torch.tensor(cells, dtype=torch.int64), minlength=2 * size * size)
        self.rounds_CGA += counts.view(2, size, size).to(self.rounds_CGA.device)

    def compute(self) -> dict[str, float | list[int] | list[float | None] | None]:
        """Return the report's fields on accepted and drafted tokens; lists go by draft position or by length, from 0."""
        lengths = torch.arange(self.num_positions + 1, device=self.rounds_CGA.device)
        rounds_GA = self.rounds_CGA.sum(0)
        drafted_G, accepted_A = rounds_GA.sum(1), rounds_GA.sum(0)
        num_accepted = (accepted_A * lengths).sum()
        return {
            "accepted_per_round": _ratio(num_accepted, rounds_GA.sum()),
            "draft_token_yield": _ratio(num_accepted, self.drafts),
            "position_conditional": [self._conditional(position) for position in range(self.num_positions)],
            "position_survival": [self._survival(position) for position in range(self.num_positions)],
            "accepted_histogram": accepted_A.tolist(),
            "drafted_histogram": drafted_G.tolist(),
        }

    def _conditional(self, position: int) -> float | None:
        """Return accepted at `position` / judged there."""
        accepted, reached = self._accepted_and_drafted(position, from_accepted=position)
        return _ratio(accepted, reached)

    def _survival(self, position: int) -> float | None:
        """Return accepted at `position` / drafted so far and not cut before: the chance that a draft gets this far."""
        accepted, drafted = self._accepted_and_drafted(position, from_accepted=0)
        return _ratio(accepted, drafted)

    def _accepted_and_drafted(self, position: int, *, from_accepted: int) -> tuple[Tensor, Tensor]:
        """Count rounds that drafted past `position`: those accepted there, and all that had at least `from_accepted`."""
        whole_GA, cut_GA = self.rounds_CGA[:, position + 1 :]
        accepted = whole_GA[:, position + 1 :].sum() + cut_GA[:, position + 1 :].sum()
        refused = whole_GA[:, from_accepted : position + 1].sum()  # a cut round refused nothing
        return accepted, accepted + refused


class OverlapAlpha(Metric):
    """sum_v min(p, q), exact from the logits, at the positions where the decoder recorded it: the acceptance rate alpha."""

    full_state_update = False
    sum_K: Tensor
    count_K: Tensor

    def __init__(self, num_positions: int) -> None:
        super().__init__()
        self.add_state("sum_K", torch.zeros(num_positions, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count_K", torch.zeros(num_positions, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, generations: Sequence[Generation]) -> None:
        """Add the overlaps of some prompts' rounds."""
        given = [round_.overlap for generation in generations for round_ in generation.rounds if round_.overlap]
        positions = torch.tensor([position for overlap in given for position in range(len(overlap))], dtype=torch.int64)
        values = torch.tensor([value for overlap in given for value in overlap], dtype=torch.float64)
        size = len(self.sum_K)
        self.sum_K += torch.bincount(positions, values, minlength=size).to(self.sum_K)
        self.count_K += torch.bincount(positions, minlength=size).to(self.count_K)

    def compute(self) -> dict[str, float | list[float | None] | None]:
        """Return the mean over all recorded positions, and by position."""
        return {
            "overlap_alpha": _ratio(self.sum_K.sum(), self.count_K.sum()),
            "overlap_alpha_by_position": [_ratio(*pair) for pair in zip(self.sum_K, self.count_K, strict=True)],
        }


def _ratio(numerator: Tensor, denominator: Tensor) -> float | None:
    return numerator.item() / denominator.item() if denominator.item() else None

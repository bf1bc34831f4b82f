"""Rounds as columns: one pass in Python over the records, after which every metric is a few tensor operations.

Shapes: P prompts, R rounds, C rounds with a comparison of the two distributions, N drafts compared, F numbers of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from eval.decoder.records import DistributionComparison, Generation, Round

# The rows of `probs_FN`.
COMPARED = ("overlap", *(field.name for field in fields(DistributionComparison)))


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
    answered_R: Tensor  # tokens of the answer among them
    by_lookup_R: Tensor  # 1 where the drafts of one of several proposers were looked up
    round_N: Tensor
    position_N: Tensor  # of the draft in its round, from 0
    probs_FN: Tensor  # float64; NaN where a number was not recorded

    @property
    def cut_R(self) -> Tensor:
        """Say whether an accepted token ended the text, so that what was drafted behind it was never judged."""
        return self.committed_R == self.accepted_R

    @property
    def kept_N(self) -> Tensor:
        """Say whether the target kept the draft."""
        return self.position_N < self.accepted_R[self.round_N]

    def number_of(self, name: str) -> Tensor:
        """Return a number of `COMPARED`, or whether the draft was `accepted`, `[N]` in float64."""
        return self.kept_N.double() if name == "accepted" else self.probs_FN[COMPARED.index(name)]

    def sum_by_prompt(self, values: Tensor, prompt: Tensor) -> Tensor:
        """Return the sums of `values` by their prompts' places, `[P]` in float64."""
        return torch.bincount(prompt, values.double(), minlength=len(self.prompt_ids))


def tabulate(generations: Iterable[Generation]) -> RoundTable:
    """Return the rounds of some generations, of one mode."""
    generations = list(generations)
    place_of = {prompt_id: place for place, prompt_id in enumerate(dict.fromkeys(each.prompt_id for each in generations))}
    rounds = [round_ for generation in generations for round_ in generation.rounds]
    compared = [(number, round_) for number, round_ in enumerate(rounds) if round_.overlap]
    lengths_C = _integers(len(round_.overlap or ()) for _, round_ in compared)
    firsts_C = lengths_C.cumsum(0) - lengths_C
    own = _integers(place_of[each.prompt_id] for each in generations)
    return RoundTable(
        prompt_ids=tuple(place_of),
        prompt_R=own.repeat_interleave(_integers(len(each.rounds) for each in generations)),
        drafted_R=_integers(len(round_.drafted) for round_ in rounds),
        judged_R=_integers(round_.num_drafted for round_ in rounds),
        accepted_R=_integers(round_.num_accepted for round_ in rounds),
        committed_R=_integers(len(round_.committed) for round_ in rounds),
        context_R=_integers(len(each.prompt_tokens) + count for each in generations for count in _answered(each)),
        answered_R=_integers(count for each in generations for count in _answered(each)),
        by_lookup_R=_integers(round_.by_lookup for round_ in rounds),
        round_N=_integers(number for number, _ in compared).repeat_interleave(lengths_C),
        position_N=torch.arange(int(lengths_C.sum())) - firsts_C.repeat_interleave(lengths_C),
        probs_FN=_distributions([round_ for _, round_ in compared]),
    )


def _answered(generation: Generation) -> list[int]:
    """Return how many tokens of the answer stand before each round's; the first came from the prompt's own forward."""
    return list(accumulate((len(round_.committed) for round_ in generation.rounds), initial=1))[:-1]


def _integers(values: Iterable[int]) -> Tensor:
    return torch.from_numpy(np.fromiter(values, np.int64))


def _distributions(rounds: Sequence[Round]) -> Tensor:
    """Return the recorded comparisons `[F, N]`."""
    columns = (chain.from_iterable(_recorded(round_, name) for round_ in rounds) for name in COMPARED)
    return torch.from_numpy(np.stack([np.fromiter(column, np.float64) for column in columns]))


def _recorded(round_: Round, name: str) -> Sequence[float]:
    overlap: tuple[float, ...] = round_.overlap or ()
    if name == "overlap":
        return overlap
    values: Sequence[float] = () if round_.distributions is None else getattr(round_.distributions, name)
    return values or (float("nan"),) * len(overlap)

"""A trial's draft measured: tau, acceptance by position on held-out prompts, the times of its rounds, the speed they predict.

How long rounds take does not depend on what a draft has learnt: the timing sweep is made once for all sizes of a candidate.
G drafts, P prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from configs.schema.commands.advising import AdviceConfig
from configs.schema.decoding import DecodeConfig
from distill.dataset.conversations import Conversation
from eval.cost.model import AcceptanceProfile, CostModel, MeasuredCosts, RooflineCosts, RoundCosts, answer_lengths
from eval.cost.predict import BY_TEXT_ALONE, mean_context
from eval.cost.timing_sweep import sweep_rounds
from eval.decoder.decode import Request, decode
from eval.decoder.records import Generation
from eval.report.sections import AnswerLength, TimedRound
from eval.stats.bootstrap import Floats, Interval, ratio_interval, statistic_interval
from heads.artifact import Draft
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer

SEED = 0  # of all resampling
Counts = Sequence[tuple[int, int]]  # by prompt: committed tokens and rounds


class PromptAcceptance(BaseModel):
    """What became of the drafts for one prompt."""

    model_config = ConfigDict(frozen=True)

    prompt_id: str
    committed: int
    rounds: int
    accepted: list[int]  # by position
    judged: list[int]  # by position: all drafts before it were accepted, and the text had not ended


class TrialMeasurement(BaseModel):
    """What was measured of a trial's draft."""

    model_config = ConfigDict(frozen=True)

    kind: str
    num_parameters: int
    conversations: int  # trained on
    answer_tokens: int  # in them
    prompts: list[PromptAcceptance]
    answers: list[AnswerLength]
    context_tokens: int  # before a committed token, on average
    sweep: list[TimedRound]

    @property
    def longest(self) -> int:
        """Drafts of the longest rounds that were timed, and of those by which tau was measured."""
        return max(each.num_speculative_tokens for each in self.sweep)

    @property
    def counts(self) -> Counts:
        return [(each.committed, each.rounds) for each in self.prompts]

    def tau(self, samples: int) -> Interval:
        """Return tokens per target step in rounds of `longest` drafts."""
        return ratio_interval(*columns(self.counts), samples=samples, seed=SEED)


def columns(counts: Counts) -> tuple[list[float], list[float]]:
    """Return committed tokens and rounds by prompt, as intervals take them."""
    return [float(committed) for committed, _ in counts], [float(rounds) for _, rounds in counts]


def to_request(row: Conversation) -> Request:
    return Request(prompt_id=f"{row.prompt_id}/{row.turn}", category=row.category, tokens=row.prompt_ids)


def decode_in_batches(
    target: Target, requests: Sequence[Request], settings: DecodeConfig, proposer: Proposer, *, what: str
) -> list[Generation]:
    """Decode requests `settings.batch_size` at a time; `what` names the draft where logits are not finite."""
    generations: list[Generation] = []
    for start in range(0, len(requests), settings.batch_size):
        generations += decode(target, requests[start : start + settings.batch_size], settings, proposer)[0]
    check_finite(generations, what)
    return generations


def check_finite(generations: Iterable[Generation], what: str) -> None:
    """Raise a RuntimeError, with the draft's name and the first prompt, where target or draft computed NaN or infinity."""
    failed = [generation.prompt_id for generation in generations if generation.stop_reason == "non_finite"]
    if failed:
        raise RuntimeError(f"{what}: the logits of target or draft are not finite on prompt {failed[0]}")


def measure_draft(
    target: Target, draft: Draft, rows: Sequence[Conversation], config: AdviceConfig, sweep: list[TimedRound] | None
) -> dict[str, Any] | None:
    """Return the fields of a measurement but for what was trained on; None where nothing is drafted, no sweep: make it."""
    settings = DecodeConfig(
        num_speculative_tokens=config.cost.num_speculative_tokens,
        max_new_tokens=config.answers.max_new_tokens,
        batch_size=config.decode_batch_size,
    )
    text = [token for row in rows for token in (*row.prompt_ids, *row.answer_ids)]
    sweep = sweep or sweep_rounds(target, draft.proposer, text, settings, config.cost)
    if not sweep:
        return None
    longest = max(each.num_speculative_tokens for each in sweep)
    settings = settings.model_copy(update={"num_speculative_tokens": longest})
    requests = [to_request(row) for row in rows]
    generations = decode_in_batches(target, requests, settings, draft.proposer, what=draft.metadata.kind)
    lengths = answer_lengths(generations, settings.max_new_tokens)
    if not lengths:
        return None
    return {
        "kind": draft.metadata.kind,
        "num_parameters": draft.num_parameters,
        "prompts": count_positions(generations, longest),
        "answers": lengths,
        "context_tokens": mean_context(generations),
        "sweep": sweep,
    }


def pool_forwards(sweeps: Mapping[str, Sequence[TimedRound]]) -> dict[str, list[TimedRound]]:
    """Return the sweeps of several drafts with the target's forwards taking equally long in all, in plain rounds.

    They are timed at different minutes, which must not decide between two drafts: the median of their ratios is kept.
    """
    plain = {
        (name, each.batch_size, each.context_tokens): each.verify_seconds
        for name, sweep in sweeps.items()
        for each in sweep
        if each.num_speculative_tokens == 0
    }
    ratios: defaultdict[tuple[float, ...], list[float]] = defaultdict(list)
    for name, sweep in sweeps.items():
        for each in sweep:
            ratios[_forward(each)].append(each.verify_seconds / plain[name, each.batch_size, each.context_tokens])
    return {
        name: [
            each.model_copy(
                update={"verify_seconds": plain[name, each.batch_size, each.context_tokens] * median(ratios[_forward(each)])}
            )
            for each in sweep
        ]
        for name, sweep in sweeps.items()
    }


def count_positions(generations: Iterable[Generation], num_positions: int) -> list[PromptAcceptance]:
    """Count each prompt's accepted and judged drafts by position, as `eval.metrics.acceptance` counts those of all prompts."""
    found = []
    for generation in generations:
        accepted, judged = np.zeros((2, num_positions), dtype=np.int64)
        for round_ in generation.rounds:
            accepted[: round_.num_accepted] += 1
            judged[: min(len(round_.drafted), round_.num_accepted + (not round_.was_cut))] += 1
        found.append(
            PromptAcceptance(
                prompt_id=generation.prompt_id,
                committed=generation.num_committed,
                rounds=len(generation.rounds),
                accepted=accepted.tolist(),
                judged=judged.tolist(),
            )
        )
    return found


class TrialSpeed:
    """The speed that the cost model predicts for a trial's draft, on this machine or the one that the config names."""

    def __init__(self, measured: TrialMeasurement, config: AdviceConfig) -> None:
        self.measured, self.samples = measured, config.bootstrap_samples
        self._costs: RoundCosts = MeasuredCosts(measured.sweep)
        if config.hardware is not None:
            machine = config.hardware.machine
            self._costs = RooflineCosts(measured.sweep, machine.memory_gb_per_second * 1e9, machine.tflops * 1e12)
        positions = range(measured.longest)  # accepted and judged drafts [P] by position, one after another
        self._columns = [[each.accepted[place] for each in measured.prompts] for place in positions]
        self._columns += [[each.judged[place] for each in measured.prompts] for place in positions]

    @cached_property
    def model(self) -> CostModel:
        """The cost model by the acceptance over all prompts."""
        return self._model(np.array(self._columns).sum(axis=1))

    @property
    def conditional(self) -> list[float | None]:
        """The share accepted at each position, of the drafts judged there."""
        return _shares(np.array(self._columns).sum(axis=1))

    def best(self, batch: int) -> tuple[int, float]:
        """Return the fastest number of drafts for a batch and its speedup, which may be below 1."""
        return self.model.best(batch, self.measured.context_tokens)

    def speedup(self, drafts: int, batch: int) -> Interval:
        """Return the speedup with its interval over prompts."""

        def predicted(sums: Floats) -> Floats:
            values = [
                self._model(own).speedup(drafts, batch, self.measured.context_tokens) for own in sums.reshape(len(sums), -1).T
            ]
            return np.array(values) if sums.ndim > 1 else np.array(values[0])

        return statistic_interval(predicted, *self._columns, samples=self.samples, seed=SEED)

    def break_even_batch(self) -> int | None:
        """Return the largest batch at which drafting pays: 0 for none, None for all that were looked at."""
        return self.model.break_even_batch(self.measured.context_tokens)

    def draft_share(self, drafts: int, batch: int) -> float:
        """Return the seconds of drafting over those of a plain round, both as timed on this machine."""
        context, costs = self.measured.context_tokens, MeasuredCosts(self.measured.sweep)
        return costs.draft(drafts, batch, context) / costs.round_seconds(0, batch, context, 0.0)

    def _model(self, sums: Floats) -> CostModel:
        profile = AcceptanceProfile(_shares(sums), by_text_alone=self.measured.kind in BY_TEXT_ALONE)
        return CostModel(self._costs, profile, self.measured.answers, self.measured.longest)


def _forward(timed: TimedRound) -> tuple[float, ...]:
    """Return what forwards of the same work have in common: an early exit's verification, say, is another one."""
    return timed.num_speculative_tokens, timed.batch_size, timed.context_tokens, timed.verify_bytes, timed.verify_flops


def _shares(sums: Floats) -> list[float | None]:
    accepted_G, judged_G = np.split(sums, 2)
    return [float(above / below) if below else None for above, below in zip(accepted_G, judged_G, strict=True)]

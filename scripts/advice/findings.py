"""What the measurements come to: the best trial, its speed by batch and with more data, and the advice in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from configs.schema.commands.advising import AdviceConfig
from eval.report.text import interval, number
from eval.stats.bootstrap import Interval
from heads.formats.exporting.table import engines_of
from scripts.advice.candidates import Candidate
from scripts.advice.curve import DataCurve
from scripts.advice.halving import Rung
from scripts.advice.measuring import TrialMeasurement, TrialSpeed


class Findings:
    """What an advice says of the last rung's best trial and the curve; `measured` is by candidate and conversations."""

    def __init__(
        self,
        config: AdviceConfig,
        measured: Mapping[tuple[str, int], TrialMeasurement],
        rungs: Sequence[Rung[Candidate]],
        curve: DataCurve | None,
        num_answer_tokens: int,
    ) -> None:
        self.config, self.measured, self.rungs, self.curve = config, measured, rungs, curve
        self.num_answer_tokens = num_answer_tokens
        self.best: Candidate = rungs[-1].ranked[0][0]
        self.trial = measured[self.best.name, rungs[-1].size]
        self.speed = TrialSpeed(self.trial, config)

    def drafts(self, batch: int) -> int:
        """Return the fastest number of drafts a round for a batch."""
        return self.speed.best(batch)[0]

    @cached_property
    def speedups(self) -> dict[int, Interval]:
        """The predicted speedup by batch, each with its fastest number of drafts."""
        batches = sorted({self.config.batch_size, *self.config.batches_shown})
        return {batch: self.speed.speedup(self.drafts(batch), batch) for batch in batches}

    @cached_property
    def whole_training(self) -> Interval | None:
        """The speedup predicted for training on all conversations; None where the trial saw fewer, and there is no curve."""
        if self.trial.answer_tokens == self.num_answer_tokens:
            return self.speedups[self.config.batch_size]
        return None if self.curve is None else self.speedup_at(self.curve.predicted[self.num_answer_tokens])

    def speedup_at(self, tau: Interval) -> Interval:
        """Return the speedup predicted for another tau: a round takes as long, and yields so many times the tokens."""
        now, measured = self.speedups[self.config.batch_size].point, self.trial.tau(self.config.bootstrap_samples).point
        if now is None or measured is None:
            return Interval(None)
        return Interval(*(None if value is None else now * value / measured for value in (tau.point, tau.low, tau.high)))

    def sentences(self) -> dict[str, str]:
        """Return the advice, a sentence or two for each question."""
        by_batch = [f"{self.drafts(batch)} at batch {batch} ({bounded(each)})" for batch, each in self.speedups.items()]
        return {
            "Draft": self._draft(),
            "Engines": name_engines(self.best, self.rungs),
            "Drafts a round": f"fastest by the cost model: {', '.join(by_batch)}.",
            "Batch": self._batch(),
            "More data": self._data(),
        }

    def _draft(self) -> str:
        tau = self.trial.tau(self.config.bootstrap_samples)
        predicted = self.speedups[self.config.batch_size]
        text = (
            f"train {self.best.name}. After {self.trial.answer_tokens:,} answer tokens its tau is {bounded(tau)} at "
            f"{self.trial.longest} drafts a round, and its predicted speedup {bounded(predicted)} at batch "
            f"{self.config.batch_size}."
        )
        if (predicted.high or 0.0) < 1:
            return f"{text} So small a training does not pay: read the curve of more data below before a long one."
        if (predicted.low or 0.0) <= 1:
            return f"{text} Whether it pays cannot be told from these prompts."
        return text

    def _batch(self) -> str:
        largest, beyond = self.speed.break_even_batch(), max(self.config.cost.batch_sizes)
        if largest == 0:
            return "drafting is predicted to pay at no batch."
        guess = f"; batches above {beyond} were not timed but extrapolated" if largest is None or largest > beyond else ""
        if largest is None:
            return f"drafting is predicted to pay at every batch that was looked at (up to 1,024){guess}."
        return f"drafting is predicted to pay up to a batch of {largest}; from {largest + 1} on do not speculate{guess}."

    def _data(self) -> str:
        if self.curve is None:
            return "not fitted: the advised trial was run at one size only; a larger --budget has time for more."
        check = self.curve.check
        said = ", ".join(
            f"{bounded(tau)} at {tokens:,} (speedup {number(self.speedup_at(tau).point)})"
            for tokens, tau in self.curve.predicted.items()
        )
        text = (
            f"tau by answer tokens is expected to be {said}; the trial saw {self.trial.answer_tokens:,}, all conversations "
            f"have {self.num_answer_tokens:,}."
        )
        if check is None:
            return f"{text} The curve goes through two sizes, and was not checked by a further one."
        seen = f"{bounded(check.predicted)} was predicted for {check.tokens:,}, {bounded(check.measured)} measured"
        if check.holds:
            return f"{text} Checked: from the smaller sizes {seen}."
        return f"{text} Off: from the smaller sizes {seen}, so do not rely on the curve."


def name_engines(best: Candidate, rungs: Sequence[Rung[Candidate]]) -> str:
    """Say which engines take the advised draft; where none does, which other trial came furthest of those that one takes."""
    if engines := engines_of(best.kind):
        return f"{best.kind} is exported for {', '.join(engines)}."
    ranked = [candidate for rung in reversed(rungs) for candidate, _ in rung.ranked]
    served = next((each for each in ranked if engines_of(each.kind)), None)
    other = "" if served is None else f" Of the trials that one takes, {served.name} came furthest; engine leaves others out."
    return f"none takes {best.kind}, which draftsmith's own decoder runs.{other}"


def bounded(value: Interval) -> str:
    """Return a number with its interval."""
    return f"{number(value.point)} {interval(value.bounds)}".rstrip()

"""The cost rule's settings from a report alone: its calibration curve, and the phases that it timed.

`eval.cost.draft_length.fit_stopping` takes rounds and times that were measured for the purpose; this takes what every report
of a chain drafted to a fixed length holds. Times of target steps between one row (plain decoding) and as many as were
verified are put on a straight line; where a machine has stairs there, give `eval.cost.draft_length` measured ones. The price
of time is left to the rule, which takes the best fixed length's. Left out: batches, whose rows stop one by one and share the
time of a step.


How sure a draft was of each token of a round, the whole round long, and how many of them the target kept.

`ConfidenceProbe` goes around a proposer and notes it while the decoder runs; `eval.cost.draft_length` makes settings of such
rounds. What is paired: the confidence of the distribution a draft was drawn from (`heads.proposers.draft_length.confidence`, at
temperature 1 where decoding is greedy), and acceptance given that all drafts before it were accepted. The report has the same
pairs by class of confidence (`eval.metrics.distributions.StoppingCalibration`), and not the drafts behind the first refused
one, which the price of time asks for. B batch, G drafts.


The settings of cost-optimal draft lengths (`configs.schema.drafting.CostStopping`) from what was measured.

From rounds that were drafted to a fixed length (`eval.cost.draft_length.ConfidenceProbe`) and the times of draft and target
steps, it takes the calibration, the mean acceptance and the price of time. The price is the fixed point of Dinkelbach's
iteration: with the rule in force at some price, the tokens to be expected in the measured rounds over the time they would
take are the next price. With the best policy for each price it would rise to the best rate there is; this rule is close to
the best one. R rounds, G drafts of a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.runtime.errors import InputError
from configs.schema.decoding import SamplingConfig
from configs.schema.drafting import CalibrationPoint, CostStopping
from eval.metrics.distributions import class_sums, describe_classes
from eval.report.schema import Report
from eval.report.sections import WholeSpeedSection
from heads.families.registry import FAMILIES
from heads.proposers.draft_length import CostRule, calibrated, confidence, sampling_for_stopping, tokens_per_millisecond
from heads.proposers.protocol import Proposal, Proposer, Tokens
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.probabilities import token_probabilities
from heads.target.hidden_states import TargetStates


@dataclass(frozen=True, kw_only=True)
class DraftedRound:
    """The confidences of a round's drafts and how many of them were accepted; the next one, if any, was refused."""

    confidences: tuple[float, ...]
    num_accepted: int

    @property
    def pairs(self) -> list[tuple[float, bool]]:
        """Confidence and acceptance of each judged draft. Those behind the first refused one were not judged."""
        return [(sure, place < self.num_accepted) for place, sure in enumerate(self.confidences[: self.num_accepted + 1])]


class ConfidenceProbe:
    """A proposer that notes every round in `rounds` and is otherwise the one it goes around.

    An answer's last round is left out: where an answer ends, drafts may stand behind the last judged one that look refused.
    Proposals without a distribution (lookups) leave nothing to note. Not for self-speculation, which the decoder has to see
    itself.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.taps = proposer, proposer.taps
        self.rounds: list[DraftedRound] = []
        self._confidences: list[list[float]] = []
        self._pending: list[DraftedRound | None] = []  # by row: the last round, until it is known to have a successor

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self._pending = []
        self.proposer.start(tokens, capacity, states)

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, rng: CounterRNG, *, keep_logits: bool
    ) -> Proposal:
        self.rounds += [round_ for round_ in self._pending if round_ is not None]
        proposal = self.proposer.propose(tokens, num_tokens, sampling, rng, keep_logits=True)
        self._confidences = _confidences(proposal, sampling)
        return proposal

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        self._pending = [
            DraftedRound(confidences=tuple(sure), num_accepted=accepted) if sure else None
            for sure, accepted in zip(self._confidences, num_accepted, strict=True)
        ]
        self.proposer.commit(num_accepted, states)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._pending = [self._pending[row] for row in rows]
        self.proposer.keep_rows(rows)


def _confidences(proposal: Proposal, sampling: SamplingConfig) -> list[list[float]]:
    """Return how sure the draft was of each token it proposed, by row."""
    if proposal.logits_BGV is None:
        return [[] for _ in proposal.num_drafted]
    sure_BG = confidence(token_probabilities(proposal.logits_BGV, sampling_for_stopping(sampling)))
    return [row[:count] for row, count in zip(sure_BG.tolist(), proposal.num_drafted, strict=True)]


MOST_ITERATIONS = 50
STANDS_STILL = 1e-9  # relative


def fit_stopping(
    rounds: Sequence[DraftedRound],
    *,
    draft_step_milliseconds: float,
    target_step_milliseconds: Sequence[float],
    round_milliseconds: float = 0.0,
    num_bins: int = 15,
) -> CostStopping:
    """Return the cost rule's settings for a draft on a machine.

    Args:
        rounds: of this draft with no stopping rule in force, so that confident and unsure rounds are equally long.
        draft_step_milliseconds: of one more draft.
        target_step_milliseconds: of a target step on 1, 2, ... rows.
        round_milliseconds: of what a round does besides.
        num_bins: of the calibration.

    Raises:
        ValueError: no round drafted anything, or the target's times are fewer than the drafts of a round and one.
    """
    pairs = [pair for round_ in rounds for pair in round_.pairs]
    longest = max((len(round_.confidences) for round_ in rounds), default=0)
    if not pairs:
        raise ValueError("no round drafted anything, so there is nothing to fit a stopping rule to")
    if len(target_step_milliseconds) <= longest:
        raise ValueError(
            f"times of target steps on 1 to {longest + 1} rows are needed for rounds of {longest} drafts, "
            f"got {len(target_step_milliseconds)}"
        )
    confidence_N, accepted_N = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    classes = describe_classes(class_sums(confidence_N, accepted_N, num_classes=num_bins), ("accepted",))
    settings = CostStopping(
        rule="cost",
        draft_step_milliseconds=draft_step_milliseconds,
        target_step_milliseconds=list(target_step_milliseconds),
        round_milliseconds=round_milliseconds,
        calibration=calibration_points(classes),
        acceptance=min(sum(accepted for _, accepted in pairs) / len(pairs), 0.999),
    )
    # Shorter rounds are those for which an answer had no more room; they say nothing of how long it pays to draft.
    whole = [round_.confidences for round_ in rounds if len(round_.confidences) == longest]
    price = _price_of_time(settings, torch.tensor(whole, dtype=torch.float64))
    return settings.model_copy(update={"tokens_per_second": 1000 * price})


def calibration_points(classes: Iterable[Mapping[str, Any]]) -> list[CalibrationPoint]:
    """Return a curve as points that never fall: neighbours that do are pooled, by their counts (isotonic regression).

    Args:
        classes: of `eval.metrics.distributions.describe_classes`, `accepted` among their means, or a report's
            `stopping_reliability`.
    """
    pooled: list[list[float]] = []  # count, sum of confidences, sum of acceptances
    for each in classes:
        count = each["num_drafts"]
        if count == 0:
            continue
        pooled.append([count, count * each["confidence"], count * each["accepted"]])
        while len(pooled) > 1 and pooled[-2][2] / pooled[-2][0] > pooled[-1][2] / pooled[-1][0]:
            last = pooled.pop()
            pooled[-1] = [one + other for one, other in zip(pooled[-1], last, strict=True)]
    return [CalibrationPoint(confidence=min(sure / n, 1.0), acceptance=min(kept / n, 1.0)) for n, sure, kept in pooled]


def expected_rate(settings: CostStopping, confidences_RG: Tensor) -> float:
    """Return the tokens per millisecond to be expected of the rule in rounds with such distributions, by its own calibration.

    Args:
        settings: the rule's.
        confidences_RG: of the distributions of R rounds, each drafted to the full length G.
    """
    rule = CostRule(settings, confidences_RG.shape[1])
    steps_R, drafted_R = torch.zeros(2, len(confidences_RG), dtype=torch.int64)
    open_R = torch.ones(len(confidences_RG), dtype=torch.bool)
    for sure_R1 in confidences_RG.split(1, 1):  # all that the rule reads of a distribution is its largest value
        decision = rule.decide(sure_R1)
        steps_R += open_R
        drafted_R += open_R & decision.drafts_B
        open_R &= decision.continues_B
    alive_RG = calibrated(settings.calibration, confidences_RG).cumprod(1)
    counts_RG = torch.arange(confidences_RG.shape[1]) < drafted_R.unsqueeze(1)
    target_R = alive_RG.new_tensor(settings.target_step_milliseconds)[drafted_R]
    milliseconds_R = settings.round_milliseconds + steps_R * settings.draft_step_milliseconds + target_R
    return float((1 + (alive_RG * counts_RG).sum(1)).sum() / milliseconds_R.sum())


def _price_of_time(settings: CostStopping, confidences_RG: Tensor) -> float:
    price = tokens_per_millisecond(settings, confidences_RG.shape[1])
    for _ in range(MOST_ITERATIONS):
        old = price
        price = expected_rate(settings.model_copy(update={"tokens_per_second": 1000 * old}), confidences_RG)
        if abs(price - old) <= STANDS_STILL * old:
            break
    return price


def stopping_from_report(report: Report) -> CostStopping:
    """Return settings for the draft, target and machine of a report.

    Raises:
        InputError: the report's rounds or times cannot tell; the sentence says why.
    """
    speed = _check(report)
    acceptance, gamma = report.acceptance, report.decode.num_speculative_tokens
    phases, rounds = speed.phases, acceptance.num_rounds * speed.repeats
    drafts = sum(length * count for length, count in enumerate(acceptance.drafted_histogram)) * speed.repeats
    one_row = 1000 * speed.phases_autoregressive.verify_seconds / speed.decode_tokens_autoregressive
    all_rows = 1000 * phases.verify_seconds / rounds
    besides = 1000 * (phases.sample_seconds + phases.overhead_seconds) / rounds
    if _in_one_forward(report.draft.kind):
        draft_step, besides = 0.0, besides + 1000 * phases.draft_seconds / rounds
    else:
        draft_step = 1000 * phases.draft_seconds / drafts
    classes = [each.model_dump() for each in acceptance.stopping_reliability if each.num_drafts]
    accepted = sum(each["accepted"] * each["num_drafts"] for each in classes)
    return CostStopping(
        rule="cost",
        draft_step_milliseconds=draft_step,
        target_step_milliseconds=[one_row + (all_rows - one_row) * rows / gamma for rows in range(gamma + 1)],
        round_milliseconds=max(0.0, besides),
        calibration=calibration_points(classes),
        acceptance=min(accepted / sum(each["num_drafts"] for each in classes), 0.999),
    )


def _in_one_forward(kind: str) -> bool:
    return kind in FAMILIES and FAMILIES[kind].in_one_forward


def _check(report: Report) -> WholeSpeedSection:
    """Return the report's times if settings can be fitted to it."""
    decode, speed = report.decode, report.speed
    if report.simulated:
        raise InputError("the report is simulated: its acceptance and times were not measured")
    if report.prompts.failed:
        raise InputError("the report has failed requests, so that its rounds and its times are not of the same prompts")
    if speed is None or not speed.decode_tokens_autoregressive:
        raise InputError("the report has no times: a cost rule weighs tokens against time")
    if decode.batch_size != 1:
        raise InputError(f"the report is of batches of {decode.batch_size}: measure with decode.batch_size 1")
    if decode.temperature not in (0, 1) and decode.verification in ("match", "typical"):
        raise InputError(
            f"the report is of likeliest drafts at temperature {decode.temperature:g}: stopping then looks at "
            "distributions at temperature 1, of which the report says nothing; measure with decode.temperature 0 or 1"
        )
    for setting in ("tree", "stopping"):
        if getattr(decode, setting) is not None:
            raise InputError(
                f"the report's decode.{setting} is set: a cost rule is fitted to chains drafted to their full length"
            )
    if not any(each.num_drafts for each in report.acceptance.stopping_reliability):
        raise InputError(
            "the report has no stopping_reliability: its draft has no distribution (a lookup), drafted nothing, or an earlier "
            "draftsmith wrote it; run eval/run.py again"
        )
    return speed

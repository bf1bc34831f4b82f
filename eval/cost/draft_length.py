"""Settings of the cost-optimal draft length (`configs.schema.drafting.CostStopping`), fitted to measured rounds or to a report.

The rule needs a calibration, how often drafts of some confidence are accepted where all before them were, and the times of
draft and target steps. `fit_stopping` takes both from rounds measured for the purpose (`choose_stopping`), and sets the price
of time too. `stopping_from_report` takes what a report of chains of a fixed length holds, and leaves that price to the rule.
R rounds, B batch, G drafts of a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, SamplingConfig
from configs.schema.drafting import CalibrationPoint, ConfidenceBy, CostStopping
from eval.cost.tree_choice import row_seconds
from eval.decoder.decode import Request, decode
from eval.metrics.distributions import class_sums, describe_classes
from eval.report.schema import Report
from eval.report.sections import WholeSpeedSection
from heads.artifact import Draft
from heads.families.registry import drafts_in_one_forward
from heads.frozen.hidden_states import TargetStates
from heads.frozen.loading import Target
from heads.proposers.draft_length import CostRule, calibrated, confidence, sampling_for_stopping, tokens_per_millisecond
from heads.proposers.protocol import Proposal, Proposer, Tokens
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.probabilities import token_probabilities

MOST_ITERATIONS = 50
TOLERANCE = 1e-9  # relative, of the fixed point
LARGEST_ACCEPTANCE = 0.999


def fit_stopping(
    rounds: Sequence[DraftedRound],
    *,
    draft_step_milliseconds: float,
    target_step_milliseconds: Sequence[float],
    round_milliseconds: float = 0.0,
    num_bins: int = 15,
    by: ConfidenceBy = "distribution",
) -> CostStopping:
    """Return the cost rule's settings for a draft on a machine, from rounds measured for it.

    The price of time is the fixed point of Dinkelbach's iteration: with the rule in force at some price, the expected tokens of
    the measured rounds over the time they would take are the next price.

    Args:
        rounds: of this draft with no stopping rule in force, so that confident and unsure rounds are equally long.
        draft_step_milliseconds: of one more draft.
        target_step_milliseconds: of a target step on 1, 2, ... rows.
        round_milliseconds: of what a round does besides.
        num_bins: of the calibration.
        by: what the rounds' confidences are.

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
        acceptance=min(sum(accepted for _, accepted in pairs) / len(pairs), LARGEST_ACCEPTANCE),
        by=by,
    )
    # Shorter rounds are those for which an answer had no more room; they say nothing of how long it pays to draft.
    whole = [round_.confidences for round_ in rounds if len(round_.confidences) == longest]
    price = _price_of_time(settings, torch.tensor(whole, dtype=torch.float64))
    return settings.model_copy(update={"tokens_per_second": 1000 * price})


def choose_stopping(target: Target, draft: Draft, requests: Sequence[Request], settings: DecodeConfig) -> CostStopping:
    """Return the cost rule's settings for a draft on this machine, by what it shows on prompts that are not judged.

    Args:
        target, draft: what decodes.
        requests: to decode, one at a time.
        settings: chains without a stopping rule, as long as the rule may draft.
    """
    probe = ConfidenceProbe(draft.proposer)
    timings = [decode(target, [request], settings, probe)[1] for request in requests]
    num_rounds = sum(timing.num_rounds for timing in timings)
    milliseconds = 1000 * sum(timing.draft_seconds for timing in timings) / max(1, num_rounds)
    in_one = drafts_in_one_forward(draft.metadata.kind)
    return fit_stopping(
        probe.rounds,
        draft_step_milliseconds=0.0 if in_one else milliseconds / settings.num_speculative_tokens,
        target_step_milliseconds=[
            1000 * each for each in row_seconds(target, requests[0], settings.num_speculative_tokens + 1)
        ],
        round_milliseconds=milliseconds if in_one else 0.0,
        by=probe.by,
    )


def stopping_from_report(report: Report, by: ConfidenceBy | None = None) -> CostStopping:
    """Return the cost rule's settings for the draft, target and machine of a report.

    The rule is calibrated `by` the largest probability of the draft's distributions or its own estimate of its acceptance;
    None: the estimate, of a draft that makes one. Target steps between one row (plain decoding) and as many as were verified
    are taken to lie on a straight line.

    Raises:
        InputError: the report's rounds or times do not suffice; the message says why.
    """
    speed = _check(report)
    acceptance, gamma = report.acceptance, report.decode.num_speculative_tokens
    phases, rounds = speed.phases, acceptance.num_rounds * speed.repeats
    drafts = sum(length * count for length, count in enumerate(acceptance.drafted_histogram)) * speed.repeats
    one_row = 1000 * speed.phases_autoregressive.verify_seconds / speed.decode_tokens_autoregressive
    all_rows = 1000 * phases.verify_seconds / rounds
    besides = 1000 * (phases.sample_seconds + phases.overhead_seconds) / rounds
    if drafts_in_one_forward(report.draft.kind):
        draft_step, besides = 0.0, besides + 1000 * phases.draft_seconds / rounds
    else:
        draft_step = 1000 * phases.draft_seconds / drafts
    if by is None:
        by = "estimate" if acceptance.estimate_reliability else "distribution"
    elif by == "estimate" and not acceptance.estimate_reliability:
        raise InputError(f"the report's draft ({report.draft.kind}) makes no estimate of its acceptance: fit by distribution")
    by_class = acceptance.estimate_reliability if by == "estimate" else acceptance.stopping_reliability
    classes = [each.model_dump() for each in by_class if each.num_drafts]
    accepted = sum(each["accepted"] * each["num_drafts"] for each in classes)
    return CostStopping(
        rule="cost",
        draft_step_milliseconds=draft_step,
        target_step_milliseconds=[one_row + (all_rows - one_row) * rows / gamma for rows in range(gamma + 1)],
        round_milliseconds=max(0.0, besides),
        calibration=calibration_points(classes),
        acceptance=min(accepted / sum(each["num_drafts"] for each in classes), LARGEST_ACCEPTANCE),
        by=by,
    )


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
    """Wraps a proposer and records every round in `rounds`.

    The confidences are the draft's own estimates of its acceptance where it makes them, else its distributions' largest
    probabilities; `by` says which.
    An answer's last round is left out: where an answer ends, drafts may stand behind the last judged one that look refused.
    Proposals without a distribution (lookups) are not recorded. Not for self-speculation, whose own type the decoder checks.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.taps = proposer, proposer.taps
        self.rounds: list[DraftedRound] = []
        self.by: ConfidenceBy = "distribution"
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
        if proposal.estimates_BG is not None:
            self.by = "estimate"
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


def calibration_points(classes: Iterable[Mapping[str, Any]]) -> list[CalibrationPoint]:
    """Return the acceptance at each class's mean confidence as a curve that never falls (isotonic regression).

    Args:
        classes: of `eval.metrics.distributions.describe_classes`, `accepted` among their means, or a report's
            `stopping_reliability`.
    """
    seen = [each for each in classes if each["num_drafts"]]
    accepted_C = isotonic_regression([each["accepted"] for each in seen], weights=[each["num_drafts"] for each in seen]).x
    return [
        CalibrationPoint(confidence=min(each["confidence"], 1.0), acceptance=float(np.clip(accepted, 0.0, 1.0)))
        for each, accepted in zip(seen, accepted_C, strict=True)
    ]


def expected_rate(settings: CostStopping, confidences_RG: Tensor) -> float:
    """Return the tokens per millisecond that the rule expects, by its own calibration, in rounds of such confidences.

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
        if abs(price - old) <= TOLERANCE * old:
            break
    return price


def _confidences(proposal: Proposal, sampling: SamplingConfig) -> list[list[float]]:
    """Return the confidence of each drafted token, by row."""
    sure_BG = proposal.estimates_BG
    if sure_BG is None:
        if proposal.logits_BGV is None:
            return [[] for _ in proposal.num_drafted]
        sure_BG = confidence(token_probabilities(proposal.logits_BGV, sampling_for_stopping(sampling)))
    return [row[:count] for row, count in zip(sure_BG.tolist(), proposal.num_drafted, strict=True)]


def _check(report: Report) -> WholeSpeedSection:
    """Return the report's times if settings can be fitted to it."""
    decode, speed = report.decode, report.speed
    if report.simulated:
        raise InputError("the report is simulated: its acceptance and times were not measured")
    if report.prompts.failed:
        raise InputError("the report has failed requests, so that its rounds and its times are not of the same prompts")
    if report.draft.lookups:
        raise InputError(
            f"some of the report's rounds were drafted by {report.draft.lookups[0]}, so its times are not the draft's own: fit "
            "to a report of the artifact alone"
        )
    if speed is None or not speed.decode_tokens_autoregressive:
        raise InputError("the report has no times: a cost rule weighs tokens against time")
    if decode.batch_size != 1:
        raise InputError(f"the report is of batches of {decode.batch_size}: measure with decode.batch_size 1")
    if decode.temperature not in (0, 1) and decode.verification in ("match", "typical"):
        raise InputError(
            f"the report is of likeliest drafts at temperature {decode.temperature:g}: stopping then uses "
            "distributions at temperature 1, which the report does not hold; measure with decode.temperature 0 or 1"
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

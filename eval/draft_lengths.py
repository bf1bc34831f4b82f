"""The settings of cost-optimal draft lengths (`configs.stopping.CostStopping`) from what was measured.

From rounds that were drafted to a fixed length (`eval.calibration.ConfidenceProbe`) and the times of draft and target steps,
it takes the calibration, the mean acceptance and the price of time. The price is the fixed point of Dinkelbach's iteration:
with the rule in force at some price, the tokens to be expected in the measured rounds over the time they would take are the
next price. With the best policy for each price it would rise to the best rate there is; this rule is close to the best one.
R rounds, G drafts of a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from configs.stopping import CalibrationPoint, CostStopping
from eval.calibration import DraftedRound
from eval.reliability import class_sums, describe_classes
from heads.stopping import CostRule, calibrated, tokens_per_millisecond

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
        classes: of `eval.reliability.describe_classes`, `accepted` among their means, or a report's `stopping_reliability`.
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
    """Return the tokens per millisecond to be expected of the rule in rounds with such laws, by its own calibration.

    Args:
        settings: the rule's.
        confidences_RG: of the laws of R rounds, each drafted to the full length G.
    """
    rule = CostRule(settings, confidences_RG.shape[1])
    steps_R, drafted_R = torch.zeros(2, len(confidences_RG), dtype=torch.int64)
    open_R = torch.ones(len(confidences_RG), dtype=torch.bool)
    for sure_R1 in confidences_RG.split(1, 1):  # all that the rule reads of a law is its largest value
        look = rule.look(sure_R1)
        steps_R += open_R
        drafted_R += open_R & look.draws_B
        open_R &= look.goes_on_B
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

"""The cost rule's settings from a report alone: its calibration curve, and the phases that it timed.

`eval.draft_lengths.fit_stopping` takes rounds and times that were measured for the purpose; this takes what every report of a
chain drafted to a fixed length holds. Times of target steps between one row (plain decoding) and as many as were verified are
put on a straight line; where a machine has stairs there, give `eval.draft_lengths` measured ones. The price of time is left to
the rule, which takes the best fixed length's. Left out: batches, whose rows stop one by one and share the time of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.errors import InputError
from configs.stopping import CostStopping
from eval.draft_lengths import calibration_points
from heads.families import FAMILIES


def stopping_from_report(report: Mapping[str, Any]) -> CostStopping:
    """Return settings for the draft, target and machine of a checked report.

    Raises:
        InputError: the report's rounds or times cannot tell; the sentence says why.
    """
    _check(report)
    speed, acceptance, gamma = report["speed"], report["acceptance"], report["decode"]["num_speculative_tokens"]
    phases, rounds = speed["phases"], acceptance["num_rounds"] * speed["repeats"]
    drafts = sum(length * count for length, count in enumerate(acceptance["drafted_histogram"])) * speed["repeats"]
    one_row = 1000 * speed["phases_autoregressive"]["verify_seconds"] / speed["decode_tokens_autoregressive"]
    all_rows = 1000 * phases["verify_seconds"] / rounds
    besides = 1000 * (phases["sample_seconds"] + phases["overhead_seconds"]) / rounds
    if _in_one_forward(report["draft"]["kind"]):
        draft_step, besides = 0.0, besides + 1000 * phases["draft_seconds"] / rounds
    else:
        draft_step = 1000 * phases["draft_seconds"] / drafts
    classes = [each for each in acceptance["stopping_reliability"] if each["num_drafts"]]
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


def _check(report: Mapping[str, Any]) -> None:
    decode, speed = report["decode"], report["speed"]
    if report["simulated"]:
        raise InputError("the report is simulated: its acceptance and times were not measured")
    if report["prompts"]["failed"]:
        raise InputError("the report has failed requests, so that its rounds and its times are not of the same prompts")
    if speed is None or not speed["decode_tokens_autoregressive"]:
        raise InputError("the report has no times: a cost rule weighs tokens against time")
    if decode["batch_size"] != 1:
        raise InputError(f"the report is of batches of {decode['batch_size']}: measure with decode.batch_size 1")
    if decode["temperature"] not in (0, 1) and decode.get("verification") in ("match", "typical"):
        raise InputError(
            f"the report is of likeliest drafts at temperature {decode['temperature']:g}: stopping then looks at laws at "
            "temperature 1, of which the report says nothing; measure with decode.temperature 0 or 1"
        )
    for setting in ("tree", "stopping"):
        if decode.get(setting) is not None:
            raise InputError(
                f"the report's decode.{setting} is set: a cost rule is fitted to chains drafted to their full length"
            )
    if not any(each["num_drafts"] for each in report["acceptance"].get("stopping_reliability", ())):
        raise InputError(
            "the report has no stopping_reliability: its draft has no law (a lookup), drafted nothing, or an earlier "
            "draftsmith wrote it; run eval/run.py again"
        )

"""Settings of the cost-optimal draft length (`configs.schema.drafting.CostStopping`), fitted to what a draft showed.

The rule needs a calibration, how often drafts of some confidence are accepted where all before them were, and the times of
draft and target steps. C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import isotonic_regression

from configs.runtime.errors import InputError
from configs.schema.drafting import CalibrationPoint, CostStopping
from eval.report.schema import Report
from eval.report.sections import AcceptanceSection
from heads.families.registry import drafts_in_one_forward

MAX_ACCEPTANCE = 0.999


def fit_stopping(
    kind: str,
    acceptance: AcceptanceSection,
    *,
    drafting_milliseconds: float,
    row_milliseconds: Sequence[float],
    other_milliseconds: float = 0.0,
) -> CostStopping:
    """Return the cost rule's settings for a draft on a machine.

    Times are those of drafting a round, of a target step on 1, 2, ... rows, and of what a round does besides. The rule reads
    the draft's own estimate of its acceptance, if it makes one, else its distribution.
    """
    classes = acceptance.estimate_reliability or acceptance.stopping_reliability
    known = [(each.num_drafts, each.confidence, each.accepted) for each in classes if each.num_drafts]
    if not known:
        raise InputError("no stopping_reliability: the draft has no distribution (a lookup), or drafted nothing")
    drafts_C, confidence_C, accepted_C = np.array(known, dtype=np.float64).T
    rising_C = isotonic_regression(accepted_C, weights=drafts_C).x.clip(0, 1)
    drafts = sum(length * count for length, count in enumerate(acceptance.drafted_histogram)) / acceptance.num_rounds
    in_one = drafts_in_one_forward(kind)
    return CostStopping(
        rule="cost",
        draft_step_milliseconds=0.0 if in_one else drafting_milliseconds / drafts,
        target_step_milliseconds=list(row_milliseconds),
        round_milliseconds=max(0.0, other_milliseconds + in_one * drafting_milliseconds),
        calibration=[
            CalibrationPoint(confidence=min(float(sure), 1.0), acceptance=float(accepted))
            for sure, accepted in zip(confidence_C, rising_C, strict=True)
        ],
        acceptance=min(float(np.average(accepted_C, weights=drafts_C)), MAX_ACCEPTANCE),
        by="estimate" if acceptance.estimate_reliability else "distribution",
    )


def stopping_from_report(report: Report) -> CostStopping:
    """Return the cost rule's settings for the draft, target and machine of a report of chains of a fixed length.

    Target steps between one row (plain decoding) and as many as were verified are taken to lie on a straight line.
    """
    decode, speed = report.decode, report.speed
    if speed is None or not speed.decode_tokens_autoregressive:
        raise InputError("the report has no times: a cost rule weighs tokens against time")
    if report.prompts.failed:
        raise InputError("the report has failed requests, so that its rounds and its times are not of the same prompts")
    if report.draft.lookups:
        lookups = " and ".join(report.draft.lookups)
        raise InputError(f"the report has rounds drafted by {lookups}: fit to one of the artifact alone")
    if decode.batch_size != 1:
        raise InputError(f"the report is of batches of {decode.batch_size}: measure with decode.batch_size 1")
    likeliest = decode.verification == "match" or (decode.lossy or {}).get("drafts") == "likeliest"
    if likeliest and decode.temperature not in (0, 1):
        raise InputError(
            f"the report is of likeliest drafts at temperature {decode.temperature:g}, and stopping uses distributions at "
            "temperature 1: measure with decode.temperature 0 or 1"
        )
    if others := [name for name in ("tree", "stopping") if getattr(decode, name) is not None]:
        named = " and ".join(others)
        raise InputError(f"the report has decode.{named}: a cost rule is fitted to chains drafted to their full length")
    gamma, phases, rounds = decode.num_speculative_tokens, speed.phases, report.acceptance.num_rounds * speed.repeats
    one_row = 1000 * speed.phases_autoregressive.verify_seconds / speed.decode_tokens_autoregressive
    all_rows = 1000 * phases.verify_seconds / rounds
    return fit_stopping(
        report.draft.kind,
        report.acceptance,
        drafting_milliseconds=1000 * phases.draft_seconds / rounds,
        row_milliseconds=[one_row + (all_rows - one_row) * rows / gamma for rows in range(gamma + 1)],
        other_milliseconds=1000 * (phases.sample_seconds + phases.overhead_seconds) / rounds,
    )

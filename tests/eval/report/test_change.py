"""Two reports prompt by prompt: changes are found on what both measured."""

from __future__ import annotations

import pytest

from configs.runtime.errors import InputError
from eval.report.change import speed_change, tau_change
from tests.support.reports import REMOVED, changed


def with_seconds(report, plain=1.0, speculative=1.0):
    """The report of a run whose seconds were so many times as long."""
    batches = [
        {
            "prompt_ids": each.prompt_ids,
            "autoregressive": [plain * each.autoregressive[0], each.autoregressive[1]],
            "speculative": [speculative * each.speculative[0], each.speculative[1]],
        }
        for each in report.speed.per_batch
    ]
    return changed(report, {"speed.per_batch": batches})


def test_a_report_against_itself_shows_no_change(report):
    tau, speed = tau_change(report, report), speed_change(report, report)
    assert tau.ours == tau.theirs == report.acceptance.tokens_per_target_step
    assert speed.ours == pytest.approx(report.speed.decode_speedup)
    for change in (tau, speed):
        assert (change.ratio_ci, change.outcome, change.num_clusters) == ([1.0, 1.0], "inconclusive", 32)
        assert change.detectable_percent == pytest.approx(0.0, abs=1e-9)


def test_speed_is_compared_by_each_runs_own_plain_decoding(report):
    slower_machine = with_seconds(report, plain=3.0, speculative=3.0)
    assert speed_change(slower_machine, report).ratio_ci == pytest.approx((1.0, 1.0))
    found = speed_change(with_seconds(report, speculative=1.25), report)
    assert (found.ratio, found.outcome) == (pytest.approx(0.8), "worse")


def test_only_prompts_that_both_answered_count(report):
    kept = dict(list(report.acceptance.per_prompt.items())[5:])
    found = tau_change(report, changed(report, {"acceptance.per_prompt": lambda _: kept}))
    tau = sum(tokens for tokens, _ in kept.values()) / sum(rounds for _, rounds in kept.values())
    assert (found.num_clusters, found.ours) == (27, pytest.approx(tau))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompts.sha256": "f" * 64}, "which differ"),
        ({"acceptance.per_prompt": lambda _: {"else": [4, 2]}}, "no answered prompt in common"),
    ],
)
def test_reports_without_a_common_prompt_are_refused(report, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        tau_change(report, changed(report, changes))


@pytest.mark.parametrize(
    "changes", [{"speed": None}, {"speed.per_batch": REMOVED}, {"speed.per_batch": lambda batches: batches[1:]}]
)
def test_speed_on_other_batches_is_not_compared(report, changes):
    assert speed_change(report, changed(report, changes)) is None

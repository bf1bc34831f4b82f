"""Two reports prompt by prompt: changes are found, and nothing is dropped unsaid."""

from __future__ import annotations

import pytest

from configs.runtime.errors import InputError
from eval.report.paired import compare_reports
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
    found = compare_reports(report, report)
    tau, speed = found.tokens_per_target_step, found.decode_speedup
    assert tau.ours == tau.theirs == report.acceptance.tokens_per_target_step
    assert speed.ours == pytest.approx(report.speed.decode_speedup)
    for change in (tau, speed):
        assert (change.ratio_ci, change.difference_ci, change.outcome) == ([1.0, 1.0], [0.0, 0.0], "inconclusive")
        assert change.detectable_percent == pytest.approx(0.0, abs=1e-9)
    assert (found.num_prompts, found.only_ours, found.only_theirs, found.batches_left_out) == (32, (), (), 0)


def test_a_draft_that_lost_is_worse_on_every_reading(report):
    fewer = {prompt_id: [round(0.9 * tokens), rounds] for prompt_id, (tokens, rounds) in report.acceptance.per_prompt.items()}
    found = compare_reports(changed(report, {"acceptance.per_prompt": fewer}), report).tokens_per_target_step
    assert found.outcome == "worse"
    assert found.ratio == pytest.approx(0.9, abs=0.01)
    assert found.difference_ci[1] < 0


def test_speed_is_compared_by_each_runs_own_plain_decoding(report):
    slower_machine = with_seconds(report, plain=3.0, speculative=3.0)
    assert compare_reports(slower_machine, report).decode_speedup.ratio_ci == pytest.approx((1.0, 1.0))
    found = compare_reports(with_seconds(report, speculative=1.25), report).decode_speedup
    assert (found.ratio, found.outcome) == (pytest.approx(0.8), "worse")


def test_unequal_prompts_are_refused_or_listed(report):
    counts = report.acceptance.per_prompt
    dropped = list(counts)[:5]
    kept = {key: value for key, value in counts.items() if key not in dropped}
    other = report.model_copy(update={"acceptance": report.acceptance.model_copy(update={"per_prompt": kept})})
    with pytest.raises(InputError, match=rf"27 prompts are in both, 5 only in the first \({dropped[0]}, .*, \.\.\.\)"):
        compare_reports(report, other)
    with pytest.raises(InputError, match="5 only in the second"):
        compare_reports(other, report)
    found = compare_reports(report, other, allow_unequal=True)
    assert (found.num_prompts, found.only_ours, found.only_theirs) == (27, tuple(dropped), ())
    tau = sum(tokens for tokens, _ in kept.values()) / sum(rounds for _, rounds in kept.values())
    assert found.tokens_per_target_step.ours == pytest.approx(tau)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompts.sha256": "f" * 64}, "which differ"),
        ({"acceptance.per_prompt": lambda _: {"else": [4, 2]}}, "0 prompts are in both"),
    ],
)
def test_reports_without_a_common_prompt_are_refused_even_where_unequal_ones_are_allowed(report, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        compare_reports(report, changed(report, changes), allow_unequal=True)


def test_batches_put_together_otherwise_are_counted_as_left_out(report):
    first, second, *rest = report.to_dict()["speed"]["per_batch"]
    joined = {key: [one + two for one, two in zip(first[key], second[key], strict=True)] for key in first}
    joined["prompt_ids"] = first["prompt_ids"] + second["prompt_ids"]
    found = compare_reports(report, changed(report, {"speed.per_batch": [joined, *rest]}))
    assert (found.batches_left_out, found.decode_speedup.num_clusters) == (3, 30)


@pytest.mark.parametrize("changes", [{"speed": None}, {"speed.per_batch": REMOVED}])
def test_speed_that_is_not_in_both_is_none(report, changes):
    found = compare_reports(report, changed(report, changes))
    assert found.decode_speedup is None
    assert found.tokens_per_target_step is not None

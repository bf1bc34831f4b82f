"""A cost rule fitted to a report or to rounds measured here."""

import itertools
from pathlib import Path

import pytest

from configs.runtime.command import DONE, run_command
from configs.runtime.errors import InputError
from configs.runtime.loading import load_config
from configs.schema.base import Settings
from configs.schema.evaluation import EvalConfig
from eval.cost.draft_length import stopping_from_report
from eval.evaluation import evaluate
from eval.fit_stopping import add_arguments, main
from eval.report.schema import write_report
from tests.support.evaluations import report_in, tiny_evaluation
from tests.support.reports import REMOVED, changed


def test_classes_that_fall_share_their_mean_by_counts(report):
    classes = [
        {"confidence_from": sure - 0.1, "confidence_to": sure, "num_drafts": drafts, "confidence": sure, "accepted": accepted}
        for sure, drafts, accepted in ((0.1, 2, 0.0), (0.3, 3, 1.0), (0.6, 3, 1 / 3), (0.9, 2, 1.0))
    ]
    settings = stopping_from_report(changed(report, {"acceptance.stopping_reliability": classes}))
    points = [(point.confidence, point.acceptance) for point in settings.calibration]
    assert points == [pytest.approx(pair) for pair in ((0.1, 0.0), (0.3, 4 / 6), (0.6, 4 / 6), (0.9, 1.0))]


def test_the_times_add_up_to_those_of_the_report(report):
    settings = stopping_from_report(report)
    speed, acceptance = report.speed, report.acceptance
    rounds = acceptance.num_rounds * speed.repeats
    # Every round drafted three tokens: overhead, three draft steps and a target step on four rows are the whole time.
    each = settings.round_milliseconds + 3 * settings.draft_step_milliseconds + settings.target_step_milliseconds[3]
    assert each * rounds == pytest.approx(1000 * speed.decode_seconds_speculative)
    plain = 1000 * speed.phases_autoregressive.verify_seconds / speed.decode_tokens_autoregressive
    assert settings.target_step_milliseconds[0] == pytest.approx(plain)
    steps = settings.target_step_milliseconds
    assert [after - before for before, after in itertools.pairwise(steps)] == pytest.approx([(steps[3] - plain) / 3] * 3)
    assert len(steps) == 4


def test_a_head_that_drafts_all_in_one_forward_has_no_price_for_one_more(report):
    stepwise = stopping_from_report(report)
    settings = stopping_from_report(changed(report, {"draft.kind": "dflash"}))
    assert settings.draft_step_milliseconds == 0
    whole = stepwise.round_milliseconds + 3 * stepwise.draft_step_milliseconds
    assert settings.round_milliseconds == pytest.approx(whole)


def test_a_drafts_own_estimate_is_calibrated_where_it_makes_one(report):
    assert stopping_from_report(report).by == "distribution"
    one = {"confidence_from": 0.3, "confidence_to": 0.4, "num_drafts": 30, "confidence": 0.35, "accepted": 0.2}
    other = one | {"confidence_from": 0.8, "confidence_to": 0.9, "num_drafts": 10, "confidence": 0.85, "accepted": 0.6}
    estimating = changed(report, {"acceptance.estimate_reliability": [one, other]})
    settings = stopping_from_report(estimating)
    points = [(point.confidence, point.acceptance) for point in settings.calibration]
    assert (settings.by, points, settings.acceptance) == ("estimate", [(0.35, 0.2), (0.85, 0.6)], pytest.approx(0.3))


def lossy(kind, drafts):
    """The settings of a lossy mode at a temperature other than 0 and 1."""
    return {"temperature": 0.5, "verification": kind, "lossy": {"kind": kind, "drafts": drafts}}


@pytest.mark.parametrize("kind", ["typical", "tolerance"])
def test_drafts_that_were_drawn_tell_at_any_temperature(report, kind):
    assert stopping_from_report(changed(report, {"decode": lossy(kind, "drawn")})) == stopping_from_report(report)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speed": None}, "no times"),
        ({"draft.lookups": ["prompt_lookup"]}, "rounds drafted by prompt_lookup"),
        ({"decode.batch_size": 4}, "batches of 4"),
        ({"decode.temperature": 0.5, "decode.verification": "match"}, "likeliest drafts at temperature 0.5"),
        *(({"decode": lossy(kind, "likeliest")}, "likeliest drafts at temperature 0.5") for kind in ("typical", "tolerance")),
        ({"decode.tree": {"kind": "static"}}, "has decode.tree"),
        ({"decode.stopping": {"rule": "entropy"}}, "has decode.stopping"),
        ({"acceptance.stopping_reliability": REMOVED}, "no stopping_reliability"),
        ({"prompts.failed": [{"prompt_id": "a", "mode": "m", "stop_reason": "error"}]}, "failed requests"),
    ],
)
def test_a_report_that_cannot_tell_is_refused_with_the_reason(report, changes, reason):
    with pytest.raises(InputError, match=reason):
        stopping_from_report(changed(report, changes))


def test_the_command_writes_a_config(report, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_report(Path("report.json"), report)
    argv = ["report.json", "--out", "stopping.yaml"]
    assert run_command(Settings, main, description="", argv=argv, add_arguments=add_arguments) == DONE
    assert capsys.readouterr().out == Path("stopping.yaml").read_text()
    assert load_config(EvalConfig, "stopping.yaml").decode.stopping == stopping_from_report(report)


def test_an_evaluation_decodes_by_the_rule_that_was_fitted_to_the_one_before_also_beside_a_lookup(tiny_run, tmp_path):
    settings = {"batch_size": 1, "max_new_tokens": 24}
    fixed = tiny_evaluation(tiny_run, tmp_path / "fixed", num_prompts=3, decode=settings, lookup_expects=1e9)
    assert evaluate(fixed) == DONE
    stopping = stopping_from_report(report_in(fixed))
    stopped = fixed.decode.model_copy(update={"stopping": stopping})
    again = fixed.model_copy(update={"decode": stopped, "output": str(tmp_path / "stopped")})
    assert evaluate(again) == DONE
    assert report_in(again).with_lookup.lookup_rounds_share < 1  # the others are the draft's, which ends them by the rule

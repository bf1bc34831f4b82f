"""A cost rule fitted to a report has the report's times and curve, decodes, and is refused where the report cannot tell."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from configs.runtime.errors import InputError
from configs.runtime.loading import load_config
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig, LosslessConfig, SuiteConfig
from configs.schema.target import TargetConfig
from eval.cost.draft_length import stopping_from_report
from eval.evaluation import evaluate
from eval.report.schema import load_report, write_report
from tests.support.reports import REMOVED, changed

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "fit_stopping.py"


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


def test_the_mean_acceptance_is_that_of_judged_drafts(report):
    classes = [each for each in report.acceptance.stopping_reliability if each.num_drafts]
    kept = sum(round(each.accepted * each.num_drafts) for each in classes)
    expected = kept / sum(each.num_drafts for each in classes)
    assert 0 < expected < 1
    assert stopping_from_report(report).acceptance == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speed": None}, "no times"),
        ({"simulated": True}, "simulated"),
        ({"decode.batch_size": 4}, "batches of 4"),
        ({"decode.temperature": 0.5, "decode.verification": "match"}, "likeliest drafts at temperature 0.5"),
        ({"decode.tree": {"kind": "static"}}, "decode.tree is set"),
        ({"decode.stopping": {"rule": "entropy"}}, "decode.stopping is set"),
        ({"acceptance.stopping_reliability": REMOVED}, "no stopping_reliability"),
        ({"prompts.failed": [{"prompt_id": "a", "mode": "m", "stop_reason": "error"}]}, "failed requests"),
    ],
)
def test_a_report_that_cannot_tell_is_refused_with_the_reason(report, changes, reason):
    with pytest.raises(InputError, match=reason):
        stopping_from_report(changed(report, changes))


def test_from_a_run_to_a_fitted_rule_to_a_run_that_shows_it(tiny_run, tmp_path):
    config = EvalConfig(
        target=TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"),
        draft=str(tiny_run / "artifact"),
        suite=SuiteConfig(path=str(tiny_run / "suite.jsonl"), num_prompts=4),
        decode=DecodeConfig(num_speculative_tokens=4, max_new_tokens=20),
        baselines=[],
        lossless=LosslessConfig(check_float32_prompts=0),
        bootstrap_samples=20,
        output=str(tmp_path / "fixed"),
    )
    assert evaluate(config) == 0
    stopping = stopping_from_report(load_report(tmp_path / "fixed" / "report.json"))
    # One machine's times of a toy say nothing; dear rows make the rule stop.
    stopping = stopping.model_copy(update={"target_step_milliseconds": [1.0, 1.4, 1.8, 2.2, 2.6], "round_milliseconds": 0.0})
    decode = config.decode.model_copy(update={"stopping": stopping})
    assert evaluate(config.model_copy(update={"decode": decode, "output": str(tmp_path / "stopped")})) == 0
    report = load_report(tmp_path / "stopped" / "report.json")
    assert report.lossless.verdict == "lossless"
    assert report.decode.stopping["rule"] == "cost"
    assert sum(report.acceptance.drafted_histogram[:4]) > 4  # answers' ends aside
    page = (tmp_path / "stopped" / "report.html").read_text()
    assert "When drafting stops" in page
    assert "When drafting stops" not in (tmp_path / "fixed" / "report.html").read_text()


def test_the_command_writes_a_config(report, tmp_path):
    write_report(tmp_path / "report.json", report)
    arguments = [sys.executable, str(SCRIPT), "report.json", "--out", "stopping.yaml"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (tmp_path / "stopping.yaml").read_text()
    assert load_config(EvalConfig, tmp_path / "stopping.yaml").decode.stopping == stopping_from_report(report)

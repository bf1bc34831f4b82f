"""The gate: bounds and not points, paired with the previous draft, strict about what was measured, honest exit codes."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.errors import InputError
from configs.loading import load_config
from configs.schema import GateConfig, GateRule
from eval.gating import judge
from eval.report import write_report

ROOT = Path(__file__).resolve().parents[2]
TAU = "acceptance.tokens_per_target_step"


def outcome(report, rule, baseline=None, check=None):
    """Return what the gate finds for one rule."""
    verdict = judge(report, GateConfig(rules=[GateRule(**rule)]), baseline)
    return next(finding for finding in verdict.findings if finding.check == (check or rule["metric"]))


def with_tau(report, point, low, high):
    copied = copy.deepcopy(report)
    copied["acceptance"] |= {"tokens_per_target_step": point, "tokens_per_target_step_ci": [low, high]}
    return copied


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"min": 1.79}, "pass"),
        ({"min": 1.8}, "pass"),
        ({"min": 1.9}, "inconclusive"),
        ({"min": 2.2}, "inconclusive"),
        ({"min": 2.21}, "fail"),
        ({"max": 2.2}, "pass"),
        ({"max": 1.9}, "inconclusive"),
        ({"max": 1.79}, "fail"),
        ({"min": 1.9, "bound": "point"}, "pass"),
        ({"min": 2.1, "bound": "point"}, "fail"),
    ],
)
def test_the_interval_and_not_the_point_must_clear_the_threshold(report, rule, expected):
    measured = with_tau(report, 2.0, 1.8, 2.2)

    assert outcome(measured, {"metric": TAU, **rule}).outcome == expected


def test_too_few_prompts_for_an_interval_leave_the_gate_open(report):
    report["acceptance"]["tokens_per_target_step_ci"] = None

    finding = outcome(report, {"metric": TAU, "min": 1.0})

    assert finding.outcome == "inconclusive"
    assert "fewer than two prompts" in finding.reason


@pytest.mark.parametrize("metric", ["speed.decode_speedup", "speed.phases.shares.draft"])
def test_what_was_not_measured_cannot_pass(report, metric):
    report["speed"] = None

    assert outcome(report, {"metric": metric, "min": 0.0, "bound": "point"}).reason == "not measured in this report"


def test_an_unknown_metric_is_refused_with_the_nearest_known(report):
    with pytest.raises(
        InputError, match=r"no number 'acceptance.tokens_per_step'; the nearest is 'acceptance.tokens_per_target"
    ):
        outcome(report, {"metric": "acceptance.tokens_per_step", "min": 1.0})


@pytest.mark.parametrize("metric", ["acceptance", "prompts.source", "simulated", "acceptance.per_prompt.writing-0.0"])
def test_what_is_no_metric_is_refused(report, metric):
    with pytest.raises(InputError, match="has no number"):
        outcome(report, {"metric": metric, "min": 1.0, "bound": "point"})


def test_a_metric_without_interval_asks_for_a_point_rule(report):
    with pytest.raises(InputError, match="`bound: point`"):
        outcome(report, {"metric": "acceptance.draft_token_yield", "min": 0.1})


def test_list_items_and_categories_are_metrics_too(report):
    rules = [
        GateRule(metric="acceptance.position_conditional.2", min=0.1, bound="point"),
        GateRule(metric="by_category.coding.acceptance.tokens_per_target_step", min=1.1),
    ]

    assert judge(report, GateConfig(rules=rules)).outcome == "pass"


# --- relative to a baseline ---------------------------------------------------------------------------------------


def with_fewer_tokens(report, share):
    """Plant a regression: every prompt's rounds commit `share` less, and the summary follows."""
    copied = copy.deepcopy(report)
    acceptance = copied["acceptance"]
    acceptance["per_prompt"] = {
        prompt_id: [round(committed * (1 - share) * 1000), rounds * 1000]
        for prompt_id, (committed, rounds) in acceptance["per_prompt"].items()
    }
    for name in ("tokens_per_target_step", "tokens_per_target_step_macro"):
        acceptance[name] *= 1 - share
        acceptance[f"{name}_ci"] = [bound * (1 - share) for bound in acceptance[f"{name}_ci"]]
    return copied


def test_a_regression_of_3_percent_is_found_by_pairing_prompts(report):
    worse = with_fewer_tokens(report, 0.03)
    rule = {"metric": TAU, "min": 0.98, "relative_to_baseline": True}

    paired = outcome(worse, rule, baseline=report)
    worse["prompts"]["sha256"] = "other prompts of the same names"
    unpaired = outcome(worse, rule, baseline=report)

    assert paired.outcome == "fail"
    assert (paired.low, paired.high) == pytest.approx((0.97, 0.97), abs=1e-3)
    assert unpaired.outcome == "inconclusive"


def test_a_report_equals_itself(report):
    finding = outcome(report, {"metric": TAU, "min": 1.0, "relative_to_baseline": True}, baseline=report)

    assert (finding.outcome, finding.value) == ("pass", 1.0)


def test_without_pairing_the_bounds_assume_the_worst(report):
    better = copy.deepcopy(report)
    report["speed"] |= {"decode_speedup": 1.0, "decode_speedup_ci": [0.8, 1.25]}
    better["speed"] |= {"decode_speedup": 1.5, "decode_speedup_ci": [1.25, 1.6]}

    finding = outcome(better, {"metric": "speed.decode_speedup", "min": 1.0, "relative_to_baseline": True}, baseline=report)

    assert (finding.value, finding.low, finding.high) == (1.5, 1.0, 2.0)
    assert finding.outcome == "pass"


def test_a_relative_rule_without_a_baseline_is_bad_input(report):
    with pytest.raises(InputError, match="--baseline"):
        outcome(report, {"metric": TAU, "min": 1.0, "relative_to_baseline": True})


@pytest.mark.parametrize("theirs", [None, 0.0])
def test_a_baseline_that_cannot_be_divided_by_is_bad_input(report, theirs):
    baseline = copy.deepcopy(report)
    baseline["acceptance"]["draft_token_yield"] = theirs
    rule = {"metric": "acceptance.draft_token_yield", "min": 1.0, "bound": "point", "relative_to_baseline": True}

    with pytest.raises(InputError, match="needs a number above 0"):
        outcome(report, rule, baseline=baseline)


def test_a_baseline_whose_lower_bound_is_0_is_bad_input_for_bounds_and_fine_for_points(report):
    baseline = copy.deepcopy(report)
    baseline["acceptance"] |= {"overlap_alpha": 0.1, "overlap_alpha_ci": [0.0, 0.2]}
    rule = {"metric": "acceptance.overlap_alpha", "min": 1.0, "relative_to_baseline": True}

    assert outcome(report, {**rule, "bound": "point"}, baseline=baseline).outcome == "pass"
    with pytest.raises(InputError, match=r"overlap_alpha is 0.0 in the baseline"):
        outcome(report, rule, baseline=baseline)


def test_a_simulated_baseline_is_bad_input(report):
    with pytest.raises(InputError, match="simulated"):
        judge(report, GateConfig(), {**report, "simulated": True})


# --- checks without a rule ----------------------------------------------------------------------------------------


def test_a_gate_without_rules_passes_a_sound_report(report):
    assert judge(report, GateConfig()).outcome == "pass"


@pytest.mark.parametrize(
    ("path", "value", "check"),
    [
        ("simulated", True, "simulated"),
        ("lossless.verdict", "not_lossless", "lossless"),
        ("lossless.verdict", "lossy_by_design", "lossless"),
        ("lossless.checked_prompts", 0, "lossless"),
        ("prompts.num_prompts", 31, "prompts"),
        ("prompts.failed", [{"prompt_id": "a", "mode": "speculative", "stop_reason": "non_finite"}], "prompts"),
    ],
)
def test_a_gate_without_rules_still_fails_an_unsound_report(report, path, value, check):
    *section, name = path.split(".")
    (report[section[0]] if section else report)[name] = value

    verdict = judge(report, GateConfig())

    assert verdict.outcome == "fail"
    assert [finding.check for finding in verdict.findings if finding.reason] == [check]


def test_a_verdict_is_not_explained_by_differences_that_were_not_found(report):
    report["lossless"] |= {"verdict": "lossy_by_design", "divergences": []}
    assert "no checked answer differs" in outcome(report, {"metric": TAU, "min": 1.0}, check="lossless").reason
    report["lossless"] = {**report["lossless"], "verdict": "not_lossless", "divergences": [{}, {}]}
    assert "2 differences" in outcome(report, {"metric": TAU, "min": 1.0}, check="lossless").reason


def test_too_few_prompts_fail_whatever_was_measured(report):
    assert judge(report, GateConfig(min_prompts=33)).outcome == "fail"
    assert judge(report, GateConfig(min_prompts=32)).outcome == "pass"


def test_a_lossy_rule_passes_where_the_gate_allows_it(report):
    report["lossless"]["verdict"] = "lossy_by_design"

    assert judge(report, GateConfig(lossless=["lossy_by_design"])).outcome == "pass"


def test_a_failure_outweighs_what_is_inconclusive(report):
    measured = with_tau(report, 2.0, 1.8, 2.2)
    rules = [GateRule(metric=TAU, min=1.9), GateRule(metric=TAU, min=9.0)]

    assert judge(measured, GateConfig(rules=rules[:1])).outcome == "inconclusive"
    assert judge(measured, GateConfig(rules=rules)).outcome == "fail"


# --- the command --------------------------------------------------------------------------------------------------


def run_gate(folder, *arguments):
    command = [sys.executable, str(ROOT / "eval/gate.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def report_folder(report, tmp_path):
    write_report(tmp_path / "report.json", with_tau(report, 2.0, 1.8, 2.2))
    return tmp_path


@pytest.mark.parametrize(("threshold", "code", "word"), [(1.5, 0, "pass"), (2.5, 1, "fail"), (2.0, 3, "inconclusive")])
def test_the_exit_code_is_the_verdict_and_gate_json_says_why(report_folder, threshold, code, word):
    config = ROOT / "configs/gates/demo.yaml"

    done = run_gate(report_folder, "report.json", "--config", str(config), "--set", f"rules.0.min={threshold}")

    assert done.returncode == code, done.stderr
    assert done.stdout.rstrip().endswith(f"gate: {word}")
    written = json.loads((report_folder / "gate.json").read_text())
    assert (written["outcome"], written["exit_code"]) == (word, code)
    assert written["findings"][-1]["check"] == TAU
    assert written["findings"][-1]["low"] == 1.8


def test_bad_input_is_one_sentence_and_leaves_nothing_behind(report_folder):
    done = run_gate(report_folder, "report.json", "--set", "rules=[{metric: acceptance.tau, min: 1}]")

    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "acceptance.tau" in done.stderr
    assert not (report_folder / "gate.json").exists()


@pytest.mark.parametrize(("content", "word"), [(None, "not found"), ("{", "not JSON"), ("{}", "schema_version")])
def test_a_file_that_is_no_report_is_bad_input(tmp_path, content, word):
    if content is not None:
        (tmp_path / "report.json").write_text(content)

    done = run_gate(tmp_path, "report.json")

    assert done.returncode == 2
    assert word in done.stderr


def test_the_release_gate_needs_its_baseline_and_judges_against_it(report):
    config = load_config(GateConfig, str(ROOT / "configs/gates/release.yaml"), ["min_prompts=32"])

    assert [finding.check for finding in judge(report, config, report).findings if finding.required.endswith("baseline")] == [
        TAU
    ]
    assert judge(report, config, report).outcome == "pass"
    with pytest.raises(InputError, match="--baseline"):
        judge(report, config)


def test_the_gate_starts_without_torch():
    code = "import sys, eval.gate; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0

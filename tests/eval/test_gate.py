"""The gate: bounds and not points, paired with the previous draft, strict about what was measured, honest exit codes."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.runtime.command import run_command
from configs.runtime.errors import InputError
from configs.runtime.files import sha256_of, write_json
from configs.runtime.loading import load_config
from configs.schema.evaluation import GateConfig, GateRule
from eval.gate import add_arguments, main
from eval.release import Artifact, judge
from eval.report.comparison import compare
from eval.report.schema import ServedSection, write_report
from tests.support.reports import changed

ROOT = Path(__file__).resolve().parents[2]
TAU = "acceptance.tokens_per_target_step"
SPEEDUP = "speed.decode_speedup"
TAU_OF_2 = {"acceptance": {"tokens_per_target_step": 2.0, "tokens_per_target_step_ci": [1.8, 2.2]}}
NOT_MEASURED = "not measured in this report"
F = "f" * 64
SUITE = ("prompts", "acceptance", "speed", "by_category", "baselines")  # sections of a suite


def outcome(report, metric, baseline=None, **rule):
    """Return what the gate finds for one rule."""
    verdict = judge(report, GateConfig(rules=[GateRule(metric=metric, **rule)]), baseline)
    return next(finding for finding in verdict.findings if finding.check == metric)


def check_of(report, check, artifact=None, **gate):
    """Return what one of the checks that always hold finds."""
    verdict = judge(report, GateConfig(**gate), artifact=artifact)
    return next(finding for finding in verdict.findings if finding.check == check)


@pytest.mark.parametrize(
    ("changes", "metric", "rule", "expected"),
    [
        (TAU_OF_2, TAU, {"min": 1.8}, "pass"),
        (TAU_OF_2, TAU, {"min": 1.9}, "inconclusive"),
        (TAU_OF_2, TAU, {"min": 2.21}, "fail"),
        (TAU_OF_2, TAU, {"max": 2.2}, "pass"),
        (TAU_OF_2, TAU, {"max": 1.79}, "fail"),
        (TAU_OF_2, TAU, {"min": 2.1, "bound": "point"}, "fail"),
        ({}, "acceptance.position_conditional.2", {"min": 0.1, "bound": "point"}, "pass"),
        ({}, f"by_category.coding.{TAU}", {"min": 1.1}, "pass"),
        ({}, "quality.perplexity.ratio", {"max": 1.06}, "pass"),
        ({}, "quality.exact_match.difference", {"min": -0.1}, "pass"),
    ],
)
def test_the_interval_and_not_the_point_must_clear_the_threshold(report, quality_section, changes, metric, rule, expected):
    assert outcome(changed(report, {"quality": quality_section, **changes}), metric, **rule).outcome == expected


@pytest.mark.parametrize(
    ("changes", "metric", "expected", "reason"),
    [
        ({f"{TAU}_ci": None}, TAU, "inconclusive", "fewer than three prompts"),
        ({"speed": None}, SPEEDUP, "fail", NOT_MEASURED),
        ({}, "energy.joules_per_token.ratio", "fail", NOT_MEASURED),
    ],
)
def test_what_was_not_measured_cannot_pass(report, changes, metric, expected, reason):
    finding = outcome(changed(report, changes), metric, min=0.0)
    assert (finding.outcome, reason in finding.reason) == (expected, True)


@pytest.mark.parametrize(
    ("metric", "rule", "sentence"),
    [
        *((metric, {"bound": "point"}, "is no number") for metric in ("acceptance", "prompts.source")),
        ("acceptance.tokens_per_step", {}, "no number 'acceptance.tokens_per_step'; the nearest is 'acceptance.tokens_per_tar"),
        ("acceptance.position_survival.0", {}, "`bound: point`"),
        (TAU, {"relative_to_baseline": True}, "--baseline"),
        ("acceptance.num_rounds", {"relative_to_baseline": True}, "cannot be relative to a baseline"),
    ],
)
def test_what_is_no_metric_has_no_interval_or_no_baseline_is_bad_input(report, metric, rule, sentence):
    with pytest.raises((InputError, ValidationError), match=sentence):
        outcome(report, metric, min=0.1, **rule)


# --- relative to a baseline ---------------------------------------------------------------------------------------


def relative(report, baseline, metric=TAU, least=0.98, **rule):
    return outcome(report, metric, baseline, min=least, relative_to_baseline=True, **rule)


def test_a_regression_of_3_percent_is_found_by_pairing_prompts_and_a_report_equals_itself(report):
    counts = report.acceptance.per_prompt
    fewer = {name: [round(970 * committed), 1000 * rounds] for name, (committed, rounds) in counts.items()}
    worse = relative(changed(report, {"acceptance.per_prompt": fewer}), report)
    assert (worse.outcome, worse.low, worse.high) == ("fail", pytest.approx(0.97, abs=1e-3), pytest.approx(0.97, abs=1e-3))
    same = relative(report, report, least=1.0)
    assert (same.outcome, same.value) == ("pass", 1.0)


def judged_against(report, path, value, **gate):
    """Judge a report relative to a copy of itself in which one thing differs."""
    rules = gate.pop("rules", [GateRule(metric=TAU, min=0.9, relative_to_baseline=True)])
    return judge(report, GateConfig(rules=rules, **gate), changed(report, {path: value}))


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("sha256", F, r"differs in prompts \(eval/suites/house64.jsonl, cccccccccccc here, .*ffff"),
        ("ids", lambda ids: ids[1:], "differs in prompts .*, 1 of them only here, 31,"),
        ("num_prompts", 31, "1 of the 32 prompts asked for were not answered"),
    ],
)
def test_a_further_suite_of_other_prompts_is_refused_for_rules_relative_to_it_only(report, path, value, sentence):
    ours = changed(report, {"suites": {"house": {field: report.to_dict()[field] for field in SUITE}}})
    where = f"suites.house.prompts.{path}"
    rules = [GateRule(metric=TAU, suite="house", min=0.5, relative_to_baseline=True)]
    with pytest.raises(InputError, match=sentence):
        judged_against(ours, where, value, rules=rules)
    assert judged_against(ours, where, value).outcome == "pass"


def test_rules_are_about_the_first_suite_unless_they_name_another(report):
    other = {field: report.to_dict()[field] for field in SUITE}
    both = changed(report, {"suites": {"abroad": other}, "suites.abroad.acceptance": {"tokens_per_target_step": 9.0}})
    for suite, path, value in ((None, "", report.acceptance.tokens_per_target_step), ("abroad", "suites.abroad.", 9.0)):
        rules = [GateRule(metric=TAU, suite=suite, min=1, bound="point")]
        findings = {each.check: each.value for each in judge(both, GateConfig(rules=rules)).findings}
        assert findings[f"{path}{TAU}"] == value
    with pytest.raises(InputError, match=r"no suite 'mars' \(it has: house64, abroad\)"):
        outcome(both, TAU, suite="mars", min=1)
    _, found = compare([("a", both), ("b", both)])
    assert found.tau_by_suite["abroad"].ratio.bounds == [1.0, 1.0]


def test_another_machine_is_a_reason_for_speeds_and_none_for_counts_and_another_way_of_decoding_for_both(report):
    elsewhere = {"cpu": "another machine", "cores": 64}
    speed = [GateRule(metric=SPEEDUP, min=0.5, relative_to_baseline=True)]
    assert judged_against(report, "hardware", elsewhere).outcome == "pass"
    with pytest.raises(InputError, match=r"hardware cpu \(a test machine here, another machine there\)"):
        judged_against(report, "hardware", elsewhere, rules=speed)
    with pytest.raises(InputError, match=r"differs in decode\.batch_size"):
        judged_against(report, "decode.batch_size", 8)


# --- every category, and what is free -----------------------------------------------------------------------------


def test_a_star_holds_every_category_to_the_threshold(report):
    low = {"tokens_per_target_step": 1.0, "tokens_per_target_step_ci": [0.9, 1.05]}
    gate = GateConfig(rules=[GateRule(metric=f"by_category.*.{TAU}", min=1.1)])
    findings = judge(changed(report, {"by_category.maths.acceptance": low}), gate).findings[-4:]
    assert {finding.check: finding.outcome for finding in findings} == {
        f"by_category.{name}.{TAU}": "fail" if name == "maths" else "pass" for name in report.by_category
    }


@pytest.mark.parametrize(
    ("tau_ci", "speed_ci", "expected"),
    [
        ([1.1, 1.3], [1.01, 1.2], ["pass", "pass"]),
        ([1.1, 1.3], [0.9, 1.2], ["pass", "inconclusive"]),
        ([1.1, 1.3], [1.0, 1.2], ["pass", "inconclusive"]),  # equal is not better
        ([0.7, 0.9], [0.5, 0.99], ["fail", "fail"]),
        (None, [1.1, 1.2], ["inconclusive", "pass"]),
    ],
)
def test_a_draft_must_beat_what_is_free_in_tokens_and_in_speed(report, tau_ci, speed_ci, expected):
    ratios = {"tokens_per_target_step_ratio": tau_ci, "decode_speed_ratio": speed_ci}
    lookup = {f"{name}_ci": bounds for name, bounds in ratios.items()} | dict.fromkeys(ratios, 1.1)
    gate = GateConfig(must_beat=["prompt_lookup"])
    found = judge(changed(report, {"baselines.prompt_lookup": lookup}), gate).findings[-2:]
    assert [finding.outcome for finding in found] == expected


def test_the_fastest_of_what_is_free_is_the_rival_on_every_suite(report):
    """Prompt lookup is the faster one at home, suffix lookup in the house, where the draft loses to it."""
    ways = {"prompt_lookup": (1.3, 1.2), "suffix_lookup": (1.1, 1.4)}
    home, house = (
        {
            name: report.baselines["prompt_lookup"].model_dump()
            | {"decode_speedup": speeds[place], "decode_speed_ratio": 2 / speeds[place]}
            | {"decode_speed_ratio_ci": [1.05, 1.2] if place == 0 else [0.8, 0.9]}
            for name, speeds in ways.items()
        }
        for place in (0, 1)
    )
    suite = {field: report.to_dict()[field] for field in SUITE}
    found = judge(
        changed(report, {"baselines": home, "suites": {"house": suite | {"baselines": house}}}),
        GateConfig(must_beat=["fastest"]),
    ).findings[-2:]
    assert [(finding.outcome, "prompt" in finding.check, "suffix" in finding.check) for finding in found] == [
        ("pass", True, False),
        ("fail", False, True),
    ]


@pytest.mark.parametrize(
    ("metrics", "limit", "expected"),
    [
        ([], {}, "inconclusive"),
        ([TAU], {"min": 0.0}, "pass"),
        ([TAU], {"max": 9.0}, "inconclusive"),
        ([SPEEDUP], {"min": 0.0}, "pass"),
        (["baselines.prompt_lookup.decode_speed_ratio"], {"min": 0.0}, "pass"),
        (["acceptance.position_conditional.0"], {"min": 0.0}, "inconclusive"),
        (["baselines.prompt_lookup.tokens_per_target_step", "speed.repeats"], {"min": 0.0}, "inconclusive"),
    ],
)
def test_a_gate_that_does_not_ask_what_the_draft_is_worth_cannot_pass(report, metrics, limit, expected):
    gate = GateConfig(rules=[GateRule(metric=each, bound="point", **limit) for each in metrics])
    assert judge(report, gate).outcome == expected


def test_a_rule_on_every_category_fails_where_there_is_none(report):
    gate = GateConfig(rules=[GateRule(metric=f"by_category.*.{TAU}", min=1.1)])
    assert judge(changed(report, {"by_category": lambda _: {}}), gate).outcome == "fail"


# --- checks without a rule ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "check", "expected"),
    [
        ("lossless.verdict", "not_lossless", "lossless", "fail"),
        ("lossless.verdict", "lossy_by_design", "lossless", "fail"),
        ("lossless.verdict", "inconclusive", "lossless", "inconclusive"),
        ("lossless.checked_prompts", 0, "lossless", "fail"),
        ("prompts.num_prompts", 31, "prompts", "fail"),
        ("prompts.failed", [{"prompt_id": "a", "mode": "speculative", "stop_reason": "non_finite"}], "prompts", "fail"),
        ("prompts.num_trained_on", None, "training prompts", "inconclusive"),
        ("draft.target_sha256", F, "provenance", "fail"),
    ],
)
def test_whatever_the_rules_an_unsound_report_is_stopped(report, path, value, check, expected):
    gate = GateConfig(rules=[GateRule(metric=TAU, min=0.5)])
    assert judge(report, gate).outcome == "pass"
    verdict = judge(changed(report, {path: value}), gate)
    assert verdict.outcome == expected
    assert [each.check for each in verdict.findings if each.outcome != "pass" and each.reason] == [check]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_prompts", 31),
        ("failed", [{"prompt_id": "a", "mode": "speculative", "stop_reason": "error"}]),
        ("num_trained_on", 2),
    ],
)
def test_a_further_suite_that_was_not_answered_whole_or_was_trained_on_fails_the_gate(report, field, value):
    report = changed(report, {"suites": {"house": {name: report.to_dict()[name] for name in SUITE}}})
    assert check_of(report, "prompts of house").outcome == "pass"
    assert check_of(changed(report, {f"suites.house.prompts.{field}": value}), "prompts of house").outcome == "fail"


@pytest.mark.parametrize(
    ("made_for", "sha256", "gate", "reason"),
    [
        ({}, None, {}, ""),
        ({"weights_sha256": F}, None, {}, "was made for other"),
        ({"chat_template_sha256": F}, None, {}, "was made for other"),
        ({}, F, {"allow_target_mismatch": True}, "hashes to ffffffffffff, the draft measured to bbbbbbbbbbbb"),
    ],
)
def test_the_artifact_must_be_the_one_measured_and_made_for_this_target(report, made_for, sha256, gate, reason):
    hashes = report.target.model_dump(include={"weights_sha256", "tokenizer_sha256", "chat_template_sha256"})
    artifact = Artifact(sha256=sha256 or report.draft.sha256, target=hashes | made_for)
    finding = check_of(report, "provenance", artifact, **gate)
    assert (finding.outcome, reason in finding.reason) == ("fail" if reason else "pass", True)


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        ({"min_prompts": 32}, ""),
        ({"min_prompts": 33}, "at least 33 prompts"),
        ({"suite_sha256": "c" * 64}, ""),
        ({"suite_sha256": F}, "hash to cccccccccccc"),
    ],
)
def test_a_gate_may_ask_for_a_number_of_prompts_and_for_one_suite(report, gate, reason):
    finding = check_of(report, "prompts", **gate)
    assert finding.outcome == ("fail" if reason else "pass")
    assert reason in finding.reason


@pytest.mark.parametrize(
    ("found", "share", "expected"),
    [
        (None, None, "pass"),
        (None, 0.8, "inconclusive"),
        ({"checked": False, "passed": None}, 0.8, "inconclusive"),
        ({"draft_sha256": F}, 0.8, "inconclusive"),
        ({}, 0.99, "pass"),
        ({"passed": False, "reason": "no drafted token was accepted"}, None, "fail"),
        ({"accepted": 0.7}, None, "fail"),
        ({"accepted": 0.95}, None, "pass"),
        ({"accepted": 0.95}, 0.99, "fail"),
        ({"accepted": 0.7, "num_speculative_tokens": 5}, None, "pass"),
        ({"accepted": 0.7, "prompts_sha256": None}, None, "pass"),
        ({"num_speculative_tokens": 5}, 0.8, "inconclusive"),
        ({"accepted": 0.7, "sampling": {"temperature": 0.7, "top_p": None}}, None, "fail"),
        ({"accepted": 0.7, "sampling": {"temperature": 0.8}}, None, "pass"),
    ],
)
def test_what_an_engine_said_of_the_draft_is_judged_and_may_be_asked_for(report, found, share, expected):
    """It served eight of the report's prompts, with `accepted` of its tokens per target step."""
    if found is not None:
        share_of_tau, counts = found.get("accepted", 1.0), list(report.acceptance.per_prompt.items())[:8]
        served = {"engine": "vllm", "version": "1", "checked": True, "passed": True, "reason": None}
        served |= {"draft_sha256": report.draft.sha256, "prompts_sha256": report.prompts.sha256, "num_speculative_tokens": 3}
        served["per_prompt"] = {name: [round(1000 * share_of_tau * tokens), 1000 * rounds] for name, (tokens, rounds) in counts}
        if "sampling" in found:  # of a report at this temperature; the greedy answers' counts are the report's
            report = changed(report, {"decode": {"temperature": 0.7, "verification": "one_hot"}})
            served |= {"sampled_per_prompt": served["per_prompt"], "per_prompt": report.acceptance.per_prompt}
        found = ServedSection(**served | found)
    gate = GateConfig(rules=[GateRule(metric=TAU, min=0.5)], served_tau_ratio=share)
    assert judge(report, gate, served=found).outcome == expected


def test_a_lossy_rule_passes_where_the_gate_allows_it_and_its_answers_were_judged(report, quality_section):
    report = changed(report, {"lossless.verdict": "lossy_by_design"})
    gate = GateConfig(lossless=["lossy_by_design"], rules=[GateRule(metric=TAU, min=0.5)])
    (unjudged,) = [each for each in judge(report, gate).findings if each.outcome == "fail"]
    assert unjudged.check == "lossless"
    assert "nothing says what they are worth" in unjudged.reason
    # What is allowed to differ need not be compared.
    assert judge(changed(report, {"quality": quality_section, "lossless.checked_prompts": 0}), gate).outcome == "pass"


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(report, tmp_path, monkeypatch, capsys):
    """Return a function that runs the command in a folder with `report.json`; it gives the exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    write_report(Path("report.json"), changed(report, TAU_OF_2))

    def run(*arguments):
        code = run_command(GateConfig, main, description="", argv=["report.json", *arguments], add_arguments=add_arguments)
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("threshold", "code", "word"),
    [(1.5, 0, "pass"), (2.5, 1, "fail"), (2.0, 3, "inconclusive")],
)
def test_the_exit_code_is_the_verdict_and_gate_json_says_why(gate, threshold, code, word):
    rules = f"rules=[{{metric: {TAU}, min: {threshold}}}]"
    ended, out, _ = gate("--config", str(ROOT / "configs/gates/run.yaml"), "--set", rules)
    assert (ended, out.rstrip().endswith(f"gate: {word}")) == (code, True)
    written = json.loads(Path("gate.json").read_text())
    assert (written["outcome"], written["exit_code"]) == (word, code)
    assert (written["findings"][-1]["check"], written["findings"][-1]["low"]) == (TAU, 1.8)
    assert written["report_sha256"] == sha256_of(Path("report.json"))
    assert word in Path("gate.md").read_text().splitlines()[0]


def test_bad_input_is_one_sentence_and_leaves_nothing_behind_not_even_an_earlier_verdict(gate):
    verdicts = [Path(f"gate.{suffix}") for suffix in ("json", "md")]
    for path in verdicts:
        path.write_text("an earlier pass")
    code, out, err = gate("--set", "rules=[{metric: acceptance.tau, min: 1}]")
    assert (code, out, err.count("\n"), "acceptance.tau" in err) == (2, "", 1, True)
    assert not any(path.exists() for path in verdicts)


def test_the_check_in_an_engine_is_found_where_a_run_puts_it_and_must_be_of_this_draft(gate, report):
    found = {"engine": "vllm", "version": "1", "checked": True, "passed": False, "reason": "refused", "per_prompt": {}}
    found |= {"draft_sha256": report.draft.sha256, "prompts_sha256": None, "num_speculative_tokens": 3}
    rules = ["--set", f"rules=[{{metric: {TAU}, min: 0.5}}]"]
    assert gate(*rules)[0] == 0
    write_json(Path("other.json"), found | {"draft_sha256": F})
    assert gate(*rules, "--check", "other.json")[0] == 2
    write_json(Path("check.json"), found)
    assert gate(*rules)[0] == 1
    assert "not checked" not in Path("gate.md").read_text()
    assert json.loads(Path("gate.json").read_text())["check"].endswith("check.json")


def test_a_verdict_never_takes_the_place_of_a_report(report, tmp_path, capsys):
    write_report(tmp_path / "gate.json", report)
    (tmp_path / "report.json").symlink_to("gate.json")
    for name in ("gate.json", "report.json"):
        argv = [str(tmp_path / name)]
        assert run_command(GateConfig, main, description="", argv=argv, add_arguments=add_arguments) == 2
        assert "would overwrite the report" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run", "first_release", "release"])
def test_every_gate_that_comes_along_fails_a_draft_that_prompt_lookup_beats(report, name):
    config = load_config(GateConfig, str(ROOT / f"configs/gates/{name}.yaml"), ["min_prompts=32"])
    report = changed(report, {"suites": {"house": {field: report.to_dict()[field] for field in SUITE}}})
    assert judge(report, config, report).outcome == "pass"
    metric = "tokens_per_target_step_ratio" if name == "run" else "decode_speed_ratio"
    lookup = {metric: 0.95, f"{metric}_ci": [0.9, 0.99]}
    beaten = changed(report, {"baselines.prompt_lookup": lookup})
    failed = [each.check for each in judge(beaten, config, report).findings if each.outcome == "fail"]
    assert len(failed) == 1
    assert "prompt_lookup" in failed[0]

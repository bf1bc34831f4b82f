"""The gate: bounds and not points, paired with the previous draft, strict about what was measured, honest exit codes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from configs.runtime.command import run_command
from configs.runtime.errors import InputError
from configs.runtime.files import sha256_of
from configs.runtime.loading import load_config
from configs.schema.evaluation import GateConfig, GateRule
from configs.schema.target import TargetConfig
from eval.gate import add_arguments, main
from eval.release.artifact_hash import read_shipped
from eval.release.checks import Artifact, judge
from eval.report.schema import write_report
from heads.artifact import load_draft
from heads.target.loading import load_target
from tests.support.reports import REMOVED, changed

ROOT = Path(__file__).resolve().parents[3]
TAU = "acceptance.tokens_per_target_step"


def outcome(report, rule, baseline=None, check=None):
    """Return what the gate finds for one rule."""
    verdict = judge(report, GateConfig(rules=[GateRule(**rule)]), baseline)
    return next(finding for finding in verdict.findings if finding.check == (check or rule["metric"]))


def with_tau(report, point, low, high):
    return changed(report, {"acceptance": {"tokens_per_target_step": point, "tokens_per_target_step_ci": [low, high]}})


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
    finding = outcome(changed(report, {f"{TAU}_ci": None}), {"metric": TAU, "min": 1.0})

    assert finding.outcome == "inconclusive"
    assert "fewer than two prompts" in finding.reason


@pytest.mark.parametrize("metric", ["speed.decode_speedup", "speed.phases.shares.draft"])
def test_what_was_not_measured_cannot_pass(report, metric):
    rule = {"metric": metric, "min": 0.0, "bound": "point"}

    assert outcome(changed(report, {"speed": None}), rule).reason == "not measured in this report"


def test_an_unknown_metric_is_refused_with_the_nearest_known(report):
    with pytest.raises(
        InputError, match=r"no number 'acceptance.tokens_per_step'; the nearest is 'acceptance.tokens_per_target"
    ):
        outcome(report, {"metric": "acceptance.tokens_per_step", "min": 1.0})


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        *(
            ({"metric": metric, "bound": "point"}, "has no number")
            for metric in ("acceptance", "prompts.source", "simulated", "acceptance.per_prompt.writing-0.0")
        ),
        ({"metric": "acceptance.position_survival.0"}, "`bound: point`"),
        ({"metric": TAU, "relative_to_baseline": True}, "--baseline"),
    ],
)
def test_what_is_no_metric_has_no_interval_or_no_baseline_is_bad_input(report, rule, sentence):
    with pytest.raises(InputError, match=sentence):
        outcome(report, {"min": 0.1, **rule})


def test_list_items_and_categories_are_metrics_too(report):
    rules = [
        GateRule(metric="acceptance.position_conditional.2", min=0.1, bound="point"),
        GateRule(metric="by_category.coding.acceptance.tokens_per_target_step", min=1.1),
    ]

    assert judge(report, GateConfig(rules=rules)).outcome == "pass"


# --- relative to a baseline ---------------------------------------------------------------------------------------


def test_a_regression_of_3_percent_is_found_by_pairing_prompts(report):
    fewer = {
        prompt_id: [round(970 * committed), 1000 * rounds]
        for prompt_id, (committed, rounds) in report.acceptance.per_prompt.items()
    }
    worse = changed(report, {"acceptance.per_prompt": fewer})

    finding = outcome(worse, {"metric": TAU, "min": 0.98, "relative_to_baseline": True}, baseline=report)

    assert finding.outcome == "fail"
    assert (finding.low, finding.high) == pytest.approx((0.97, 0.97), abs=1e-3)


def test_a_report_equals_itself(report):
    finding = outcome(report, {"metric": TAU, "min": 1.0, "relative_to_baseline": True}, baseline=report)

    assert (finding.outcome, finding.value) == ("pass", 1.0)


def test_speeds_are_paired_batch_by_batch_where_both_reports_keep_them(report):
    batches = report.to_dict()["speed"]["per_batch"]
    slower = [each | {"speculative": [1.05 * each["speculative"][0], each["speculative"][1]]} for each in batches]
    rule = {"metric": "speed.decode_speedup", "min": 0.98, "relative_to_baseline": True}

    paired = outcome(changed(report, {"speed.per_batch": slower}), rule, baseline=report)

    assert (paired.outcome, paired.low, paired.high) == ("fail", pytest.approx(1 / 1.05), pytest.approx(1 / 1.05))


def test_without_pairing_the_bounds_assume_the_worst(report):
    speed = {"decode_speedup": 1.0, "decode_speedup_ci": [0.8, 1.25], "per_batch": None}
    baseline = changed(report, {"speed": speed})
    better = changed(report, {"speed": speed | {"decode_speedup": 1.5, "decode_speedup_ci": [1.25, 1.6]}})

    finding = outcome(better, {"metric": "speed.decode_speedup", "min": 1.0, "relative_to_baseline": True}, baseline=baseline)

    assert (finding.value, finding.low, finding.high) == (1.5, 1.0, 2.0)
    assert finding.outcome == "pass"


@pytest.mark.parametrize(
    ("name", "value", "interval", "refused"),
    [
        ("draft_token_yield", None, None, {"point"}),
        ("draft_token_yield", 0.0, None, {"point"}),
        ("overlap_alpha", 0.1, [0.0, 0.2], {"confidence"}),  # the lower bound is 0: fine for a point rule
    ],
)
def test_a_baseline_that_cannot_be_divided_by_is_bad_input(report, name, value, interval, refused):
    baseline = changed(report, {"acceptance": {name: value, f"{name}_ci": interval}})
    rule = {"metric": f"acceptance.{name}", "min": 1.0, "relative_to_baseline": True}

    for bound in refused:
        with pytest.raises(InputError, match=rf"{name} is (None|0\.0) in the baseline report; .* needs a number above 0"):
            outcome(report, {**rule, "bound": bound}, baseline=baseline)
    if "point" not in refused:
        assert outcome(report, {**rule, "bound": "point"}, baseline=baseline).outcome == "pass"


# --- which baselines are comparable -------------------------------------------------------------------------------


def judged_against(report, path, value, **gate):
    """Judge a report relative to a copy of itself in which one thing differs."""
    rules = gate.pop("rules", [GateRule(metric=TAU, min=0.9, relative_to_baseline=True)])
    return judge(report, GateConfig(rules=rules, **gate), changed(report, {path: value}))


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("simulated", True, "is simulated"),
        ("prompts.num_prompts", 31, "1 of the 32 prompts asked for were not answered"),
        (
            "target.weights_sha256",
            "f" * 64,
            r"differs in target weights \(embedded:smollm2-135m-instruct, aaaaaaaaaaaa here, .*ffff",
        ),
        ("target.tokenizer_sha256", "f" * 64, "differs in tokenizer"),
        ("prompts.sha256", "f" * 64, r"differs in prompts \(eval/suites/house64.jsonl, cccccccccccc here"),
        ("prompts.ids", ["writing-0"], r"differs in prompts \(32 of eval/suites/house64.jsonl, 31 of them only here"),
        ("decode.num_speculative_tokens", 5, r"differs in num_speculative_tokens \(3 here, 5 there\)"),
        ("decode.temperature", 1.0, r"differs in decode.temperature \(0.0 here, 1.0 there\)"),
        ("decode.top_p", 0.9, r"differs in decode.top_p \(None here, 0.9 there\)"),
    ],
)
def test_a_baseline_made_with_something_else_is_refused_with_the_reason(report, path, value, sentence):
    with pytest.raises(InputError, match=sentence):
        judged_against(report, path, value)


@pytest.mark.parametrize(
    ("path", "value", "aspect"),
    [("decode.num_speculative_tokens", 5, "num_speculative_tokens"), ("decode.batch_size", 8, "decode")],
)
def test_another_way_of_decoding_may_be_allowed_and_is_then_noted(report, path, value, aspect):
    verdict = judged_against(report, path, value, baseline_may_differ_in=[aspect])

    assert verdict.outcome == "pass"
    assert len(verdict.notes) == 1
    assert path.removeprefix("decode.num_") in verdict.notes[0] or path in verdict.notes[0]


def test_target_and_prompts_can_not_be_allowed_to_differ():
    for aspect in ("target", "suite"):
        with pytest.raises(ValueError, match="baseline_may_differ_in"):
            GateConfig(baseline_may_differ_in=[aspect])


def test_another_seed_is_no_reason_to_refuse(report):
    assert judged_against(report, "decode.seed", 7).outcome == "pass"


def test_another_machine_is_a_reason_for_speeds_and_none_for_counts(report):
    elsewhere = {"cpu": "another machine", "cores": 64}
    speed = [GateRule(metric="speed.decode_speedup", min=0.5, relative_to_baseline=True)]

    assert judged_against(report, "hardware", elsewhere).outcome == "pass"
    with pytest.raises(InputError, match=r"hardware cpu \(a test machine here, another machine there\)"):
        judged_against(report, "hardware", elsewhere, rules=speed)
    assert judged_against(report, "hardware", elsewhere, rules=speed, baseline_may_differ_in=["machine"]).outcome == "pass"


# --- every category, and what is free -----------------------------------------------------------------------------


def test_a_star_holds_every_category_to_the_threshold(report):
    rule = GateRule(metric="by_category.*.acceptance.tokens_per_target_step", min=1.1)
    low = {"tokens_per_target_step": 1.0, "tokens_per_target_step_ci": [0.9, 1.05]}

    findings = judge(changed(report, {"by_category.maths.acceptance": low}), GateConfig(rules=[rule])).findings[-4:]

    assert {finding.check: finding.outcome for finding in findings} == {
        f"by_category.{name}.acceptance.tokens_per_target_step": "fail" if name == "maths" else "pass"
        for name in report.by_category
    }


def against_lookup(report, tau, tau_ci, speedup, speedup_ci):
    """Return the outcomes of `must_beat: [prompt_lookup]` where prompt lookup measured 1.5 in both, 1.4 to 1.6."""
    lookup = dict.fromkeys(("tokens_per_target_step", "decode_speedup"), 1.5)
    lookup |= {f"{name}_ci": [1.4, 1.6] for name in list(lookup)}
    for name in ("tokens_per_target_step_ratio", "decode_speed_ratio"):  # as in a report that does not pair the two
        lookup |= {name: None, f"{name}_ci": None}
    measured = changed(
        report,
        {
            "baselines.prompt_lookup": lookup,
            "acceptance": {"tokens_per_target_step": tau, "tokens_per_target_step_ci": tau_ci},
            "speed": {"decode_speedup": speedup, "decode_speedup_ci": speedup_ci},
        },
    )
    found = judge(measured, GateConfig(must_beat=["prompt_lookup"])).findings[-2:]
    return [finding.outcome for finding in found]


@pytest.mark.parametrize(
    ("tau_ci", "speedup_ci", "expected"),
    [
        ([1.7, 2.3], [1.61, 2.0], ["pass", "pass"]),
        ([1.7, 2.3], [1.5, 2.0], ["pass", "inconclusive"]),
        ([1.7, 2.3], [1.6, 2.0], ["pass", "inconclusive"]),  # equal is not better
        ([1.7, 2.3], [1.0, 1.3], ["pass", "fail"]),
        ([1.0, 1.2], [1.0, 1.3], ["fail", "fail"]),
        (None, [1.7, 2.0], ["inconclusive", "pass"]),
    ],
)
def test_a_draft_must_beat_what_is_free_in_tokens_and_in_speed(report, tau_ci, speedup_ci, expected):
    assert against_lookup(report, 2.0 if tau_ci != [1.0, 1.2] else 1.1, tau_ci, sum(speedup_ci) / 2, speedup_ci) == expected


def test_without_timings_nothing_beats_anything(report):
    lookup = {"decode_speed_ratio": None, "decode_speed_ratio_ci": None}
    untimed = changed(report, {"speed": None, "baselines.prompt_lookup": lookup})

    finding = judge(untimed, GateConfig(must_beat=["prompt_lookup"])).findings[-1]

    assert (finding.outcome, finding.reason) == ("fail", "not measured in this report")


def test_a_way_of_decoding_that_was_not_measured_can_not_be_beaten(report):
    with pytest.raises(InputError, match=r"no baseline 'prompt_lookup' \(it has: autoregressive\)"):
        judge(changed(report, {"baselines.prompt_lookup": REMOVED}), GateConfig(must_beat=["prompt_lookup"]))


# --- provenance ---------------------------------------------------------------------------------------------------


def provenance(report, artifact=None, **gate):
    findings = judge(report, GateConfig(**gate), artifact=artifact).findings
    return next(finding for finding in findings if finding.check == "provenance")


def artifact_of(report, **changes):
    hashes = {key: getattr(report.target, key) for key in ("weights_sha256", "tokenizer_sha256", "chat_template_sha256")}
    return Artifact(**{"sha256": report.draft.sha256, "target": hashes, **changes})


def test_the_artifact_that_was_measured_passes(report):
    assert provenance(report, artifact_of(report)).outcome == "pass"


def test_a_draft_of_another_target_or_of_an_unknown_one_is_caught_and_may_be_allowed(report):
    other = changed(report, {"draft.target_sha256": "f" * 64})

    assert provenance(other).reason == "the draft was made for other target weights than it was measured with"
    assert provenance(other, allow_target_mismatch=True).outcome == "pass"
    assert provenance(changed(report, {"draft.target_sha256": REMOVED})).outcome == "fail"


@pytest.mark.parametrize("key", ["weights_sha256", "tokenizer_sha256", "chat_template_sha256"])
def test_an_artifact_for_another_target_is_caught_whatever_the_report_says(report, key):
    made_for = dict(artifact_of(report).target) | {key: "f" * 64}

    assert "was made for other" in provenance(report, artifact_of(report, target=made_for)).reason


def test_another_artifact_than_the_measured_one_fails_even_where_another_target_is_allowed(report):
    finding = provenance(report, artifact_of(report, sha256="f" * 64), allow_target_mismatch=True)

    assert finding.outcome == "fail"
    assert "hashes to ffffffffffff, the draft measured to bbbbbbbbbbbb" in finding.reason


def test_an_artifact_on_disk_hashes_as_it_does_when_it_is_loaded(tiny_run):
    target = load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))

    shipped = read_shipped([tiny_run / "artifact"])

    assert shipped.sha256 == load_draft(tiny_run / "artifact", target.identity, target.model).sha256
    assert shipped.target["weights_sha256"] == target.identity.weights_sha256


def test_an_artifact_without_its_weights_is_called_damaged(tiny_run, tmp_path):
    shutil.copytree(tiny_run / "artifact", tmp_path / "artifact")
    (tmp_path / "artifact/model.safetensors").unlink()

    with pytest.raises(InputError, match=r"is damaged: cannot read .*model.safetensors"):
        read_shipped([tmp_path / "artifact"])


def test_several_artifacts_hash_together_in_their_order(tiny_run, tmp_path):
    other = Path(shutil.copytree(tiny_run / "artifact", tmp_path / "other"))
    metadata = json.loads((other / "draftsmith.json").read_text())
    metadata["target"]["weights_sha256"] = "f" * 64
    (other / "draftsmith.json").write_text(json.dumps(metadata))
    alone, both = read_shipped([tiny_run / "artifact"]), read_shipped([tiny_run / "artifact", other])

    assert both.sha256 != read_shipped([other, tiny_run / "artifact"]).sha256 != alone.sha256
    assert both.target["tokenizer_sha256"] == alone.target["tokenizer_sha256"]
    assert both.target["weights_sha256"] == f"{alone.target['weights_sha256']}, {'f' * 64}"


# --- checks without a rule ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "check"),
    [
        ("simulated", True, "simulated"),
        ("lossless.verdict", "not_lossless", "lossless"),
        ("lossless.verdict", "lossy_by_design", "lossless"),
        ("lossless.checked_prompts", 0, "lossless"),
        ("prompts.num_prompts", 31, "prompts"),
        ("draft.target_sha256", "f" * 64, "provenance"),
        ("prompts.failed", [{"prompt_id": "a", "mode": "speculative", "stop_reason": "non_finite"}], "prompts"),
    ],
)
def test_a_gate_without_rules_still_fails_an_unsound_report(report, path, value, check):
    verdict = judge(changed(report, {path: value}), GateConfig())

    assert verdict.outcome == "fail"
    assert [finding.check for finding in verdict.findings if finding.reason] == [check]


@pytest.mark.parametrize(
    ("path", "value", "check"),
    [("lossless.verdict", "inconclusive", "lossless"), ("statistics.bootstrap_samples", 10, "intervals")],
)
def test_an_undecided_check_or_too_few_resamples_leave_the_gate_open(report, path, value, check):
    verdict = judge(changed(report, {path: value}), GateConfig())

    assert verdict.outcome == "inconclusive"
    assert [each.check for each in verdict.findings if each.outcome != "pass"] == [check]


def test_a_verdict_is_not_explained_by_differences_that_were_not_found(report):
    lossy = changed(report, {"lossless": {"verdict": "lossy_by_design", "divergences": []}})
    assert "no checked answer differs" in outcome(lossy, {"metric": TAU, "min": 1.0}, check="lossless").reason
    wrong = changed(report, {"lossless": {"verdict": "not_lossless"}, "lossless.divergences": lambda found: 2 * found})
    assert "2 differences" in outcome(wrong, {"metric": TAU, "min": 1.0}, check="lossless").reason


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        ({}, ""),
        ({"min_prompts": 32}, ""),
        ({"min_prompts": 33}, "at least 33 prompts"),
        ({"suite_sha256": "c" * 64}, ""),
        ({"suite_sha256": "f" * 64}, "hash to cccccccccccc"),
    ],
)
def test_a_gate_may_ask_for_a_number_of_prompts_and_for_one_suite(report, gate, reason):
    verdict = judge(report, GateConfig(**gate))
    finding = next(each for each in verdict.findings if each.check == "prompts")

    assert verdict.outcome == finding.outcome == ("fail" if reason else "pass")
    assert reason in finding.reason


def test_a_lossy_rule_passes_where_the_gate_allows_it_and_its_answers_were_judged(report, quality_section):
    report = changed(report, {"lossless.verdict": "lossy_by_design"})
    gate = GateConfig(lossless=["lossy_by_design"])
    (unjudged,) = [each for each in judge(report, gate).findings if each.outcome == "fail"]
    judged = changed(report, {"quality": quality_section})

    assert (unjudged.check, unjudged.outcome) == ("lossless", "fail")
    assert "nothing says what they are worth" in unjudged.reason
    assert judge(judged, gate).outcome == "pass"
    # What is allowed to differ need not be compared.
    assert judge(changed(judged, {"lossless.checked_prompts": 0}), gate).outcome == "pass"


@pytest.mark.parametrize(
    ("key", "value", "what"), [("num_turns", 64, "turns asked"), ("format", "gsm8k", "format of the suite")]
)
def test_a_baseline_that_was_asked_otherwise_is_refused(report, key, value, what):
    report = changed(report, {"prompts": {"num_turns": 32, "format": "turns"}})

    with pytest.raises(InputError, match=what):
        judge(report, GateConfig(), changed(report, {f"prompts.{key}": value}))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"metric": "quality.perplexity.ratio", "max": 1.06}, "pass"),
        ({"metric": "quality.perplexity.ratio", "max": 1.02}, "inconclusive"),
        ({"metric": "quality.scores.gsm8k.difference", "min": -0.1}, "pass"),
        ({"metric": "quality.scores.gsm8k.difference", "min": -0.02}, "inconclusive"),
        ({"metric": "energy.joules_per_token_ratio", "max": 1.0}, "fail"),  # not measured
    ],
)
def test_quality_and_energy_are_judged_by_their_intervals(report, quality_section, rule, expected):
    assert outcome(changed(report, {"quality": quality_section}), rule).outcome == expected


def test_a_failure_outweighs_what_is_inconclusive(report):
    measured = with_tau(report, 2.0, 1.8, 2.2)
    rules = [GateRule(metric=TAU, min=1.9), GateRule(metric=TAU, min=9.0)]

    assert judge(measured, GateConfig(rules=rules[:1])).outcome == "inconclusive"
    assert judge(measured, GateConfig(rules=rules)).outcome == "fail"


# --- the command --------------------------------------------------------------------------------------------------


def run_gate(folder, *arguments):
    command = [sys.executable, str(ROOT / "eval/gate.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)


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
    assert written["report_sha256"] == sha256_of(report_folder / "report.json")
    assert word in (report_folder / "gate.md").read_text().splitlines()[0]
    suite = ElementTree.parse(report_folder / "gate.xml").getroot().find("testsuite")
    assert (suite.get("failures"), suite.get("errors")) == {0: ("0", "0"), 1: ("1", "0"), 3: ("0", "1")}[code]


def test_bad_input_is_one_sentence_and_leaves_nothing_behind_not_even_an_earlier_verdict(report_folder):
    names = [f"gate.{suffix}" for suffix in ("json", "md", "xml")]
    for name in names:
        (report_folder / name).write_text("an earlier pass")

    done = run_gate(report_folder, "report.json", "--set", "rules=[{metric: acceptance.tau, min: 1}]")

    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "acceptance.tau" in done.stderr
    assert not [name for name in names if (report_folder / name).exists()]


@pytest.mark.parametrize(
    ("output", "word"), [("report.json", "would overwrite the report"), ("verdict", "must end in .json"), ("a.md", "in .json")]
)
def test_a_verdict_never_takes_the_place_of_a_report(report_folder, output, word):
    before = (report_folder / "report.json").read_bytes()

    done = run_gate(report_folder, "report.json", "--output", output)

    assert (done.returncode, word in done.stderr) == (2, True)
    assert (report_folder / "report.json").read_bytes() == before


def test_the_command_compares_the_report_with_the_artifact(report_folder, tiny_run, monkeypatch, capsys):
    monkeypatch.chdir(report_folder)
    arguments = ["report.json", "--artifact", str(tiny_run / "artifact"), "--output", "out/verdict.json"]

    code = run_command(GateConfig, main, description="", argv=arguments, add_arguments=add_arguments)  # torch is loaded here

    assert code == 1
    assert "FAIL  provenance" in capsys.readouterr().out
    written = json.loads((report_folder / "out/verdict.json").read_text())
    assert written["artifact"] == str(tiny_run / "artifact")
    assert {path.name for path in (report_folder / "out").iterdir()} == {"verdict.json", "verdict.md", "verdict.xml"}


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

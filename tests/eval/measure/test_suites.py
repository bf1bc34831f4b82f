"""Several suites in one run: each counted and judged by itself, side by side in report, page and gate; ids never collide."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.evaluation import EvalConfig, GateConfig, GateRule, SuiteConfig
from eval.decoder.records import Generation
from eval.evaluation import evaluate
from eval.measure.record_files import read_records
from eval.release.checks import judge
from eval.report.comparison import compare, notes
from tests.support.evaluations import report_in, tiny_evaluation, write_suite


@pytest.fixture
def config(tiny_run, tmp_path):
    """A suite at home and one abroad, whose prompts have the same ids; one of those has two turns."""
    home = write_suite(tmp_path / "home.jsonl", [{"question_id": f"q{n}", "turns": [f"w{n}"]} for n in range(5)])
    rows = [{"question_id": f"q{n}", "category": f"c{n % 2}", "turns": [f"w{n} w9 w{n}", "w4"][: 1 + n % 2]} for n in range(3)]
    abroad = write_suite(tmp_path / "abroad.jsonl", rows)
    return tiny_evaluation(tiny_run, tmp_path / "evaluation", suite=home, suites=[abroad])


def test_each_suite_has_the_numbers_that_it_has_alone(config, tmp_path):
    assert evaluate(config) == 0
    report = report_in(config)
    assert report.prompts.suite == "home"
    assert list(report.suites) == ["abroad"]
    records = [each for each in read_records(Path(config.output) / "records.jsonl") if isinstance(each, Generation)]
    assert {(each.suite, each.prompt_id.startswith("abroad/")) for each in records} == {("home", False), ("abroad", True)}
    for suite, section in ((config.suite, report), (config.suites[0], report.suites["abroad"])):
        alone = config.model_copy(update={"suite": suite, "suites": [], "output": str(tmp_path / f"alone-{suite.label}")})
        evaluate(alone)
        expected = report_in(alone)
        assert section.acceptance.tokens_per_target_step == expected.acceptance.tokens_per_target_step
        assert section.acceptance.by_context_tokens == expected.acceptance.by_context_tokens
        assert section.prompts.sha256 == expected.prompts.sha256
        assert section.prompts.num_turns == expected.prompts.num_turns
        assert section.by_category.keys() == expected.by_category.keys()
        assert section.baselines.keys() == expected.baselines.keys()
        assert section.speed.num_batches == expected.speed.num_batches  # no batch holds prompts of both
    assert report.lossless.checked_prompts == 5 + 4


def test_rules_are_about_the_first_suite_unless_they_name_another(config):
    evaluate(config)
    report = report_in(config)
    taus = {"home": report, "abroad": report.suites["abroad"]}

    def value(**rule):
        rules = [GateRule(metric="acceptance.tokens_per_target_step", min=1.0, bound="point", **rule)]
        findings = {each.check: each for each in judge(report, GateConfig(rules=rules)).findings}
        assert findings["prompts of abroad"].outcome == "pass"
        return next(each for name, each in findings.items() if name.endswith("tokens_per_target_step")).value

    assert value() == value(suite="home") == taus["home"].acceptance.tokens_per_target_step
    assert value(suite="abroad") == taus["abroad"].acceptance.tokens_per_target_step
    with pytest.raises(InputError, match=r"no suite 'mars' \(it has: home, abroad\)"):
        value(suite="mars")
    every = GateRule(metric="by_category.*.acceptance.tokens_per_target_step", min=1.0, bound="point", suite="abroad")
    checks = [each.check for each in judge(report, GateConfig(rules=[every])).findings]
    assert {"suites.abroad.by_category.c0.acceptance.tokens_per_target_step"} <= set(checks)


def test_a_further_suite_is_compared_prompt_by_prompt_with_that_of_an_earlier_report(config):
    evaluate(config)
    report = report_in(config)
    rule = GateRule(metric="acceptance.tokens_per_target_step", min=1.0, relative_to_baseline=True, suite="abroad")
    finding = judge(report, GateConfig(rules=[rule]), report).findings[-1]
    assert (finding.value, finding.low, finding.high) == (1.0, 1.0, 1.0)  # paired: the worst case would be wider
    first, other = compare([("a", report), ("b", report)])
    assert other.tau_by_suite["abroad"].ratio_ci == [1.0, 1.0]
    assert "B on abroad: τ " in "".join(notes([first, other]))


def test_without_a_suite_the_first_of_several_stands_in_its_place_and_names_must_differ():
    several = [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl", "name": "other"}]
    config = EvalConfig.model_validate({"suites": several})
    assert [each.label for each in config.all_suites] == ["x", "other"]
    assert EvalConfig.model_validate(config.model_dump()) == config
    with pytest.raises(ValidationError, match="suites must have different names"):
        EvalConfig(suites=[SuiteConfig()], suite=SuiteConfig())

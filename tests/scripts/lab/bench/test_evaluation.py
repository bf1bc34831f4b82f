"""The evaluation benchmark, end to end on a tiny target: predictions from one report, speeds measured apart from it."""

import json
from pathlib import Path

import pytest

from configs.runtime.command import DONE
from configs.schema.evaluation import CostConfig, SuiteConfig
from configs.schema.target import TargetConfig
from eval.report.schema import load_report
from scripts.lab.bench.evaluation import compare_predictions, interval_coverage
from scripts.lab.settings import BenchEvalConfig

RATIOS = {"evaluator_cost_share", "predicted_vs_measured_speedup_max_error", "interval_coverage"}


@pytest.fixture(scope="module")
def config(tiny_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return BenchEvalConfig(
        target=TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"),
        draft=str(tiny_run / "artifact"),
        suite=SuiteConfig(path=str(tiny_run / "suite.jsonl"), num_prompts=6),
        max_new_tokens=16,
        cost=CostConfig(num_speculative_tokens=3, batch_sizes=[1], context_tokens=[16, 64], repeats=3),
        simulations=30,
        bootstrap_samples=50,
        output=str(folder / "eval.json"),
        runs=str(folder / "run"),
    )


@pytest.fixture(scope="module")
def results(config):
    assert compare_predictions(config) == DONE
    return json.loads(Path(config.output).read_text())


def test_each_number_of_drafts_is_predicted_from_the_report_and_measured_apart(results, config):
    speeds = results["rows"][:3]
    report = load_report(Path(config.runs) / "report.json")
    predicted = report.speed.predicted
    own = {
        each.num_speculative_tokens: each.decode_speedup
        for each in predicted.settings
        if each.batch_size == 1 and each.context_tokens == predicted.context_tokens
    }

    assert {row["num_speculative_tokens"]: row["predicted_speedup"] for row in speeds} == pytest.approx(own)
    for row in speeds:
        assert row["relative_error"] == pytest.approx(row["predicted_speedup"] / row["measured_speedup"] - 1)
        assert row["predicted_tau"] == pytest.approx(row["measured_tau"], rel=0.25)  # of few and short answers
    assert speeds[2]["predicted_tau"] == pytest.approx(report.acceptance.tokens_per_target_step, rel=0.15)
    largest = max(abs(row["relative_error"]) for row in speeds)
    assert results["ratios"]["predicted_vs_measured_speedup_max_error"] == largest


def test_the_parts_of_the_evaluation_are_all_of_its_time(results):
    parts = {row["part"]: row for row in results["rows"] if "part" in row}
    assert all(row["seconds"] > 0 for row in parts.values())
    assert sum(row["share"] for row in parts.values()) == pytest.approx(1.0)
    own = sum(parts[name]["seconds"] for name in ("comparing and recording", "losslessness", "report"))
    assert results["ratios"]["evaluator_cost_share"] == pytest.approx(own / (own + parts["decoding"]["seconds"]))


def test_intervals_hold_the_truth_about_as_often_as_they_promise():
    coverage = interval_coverage(400)

    assert 0.92 < coverage.point < 0.98
    assert coverage.low < coverage.point < coverage.high
    assert coverage.high - coverage.low == pytest.approx(2 * 1.96 * (0.95 * 0.05 / 400) ** 0.5, rel=0.3)

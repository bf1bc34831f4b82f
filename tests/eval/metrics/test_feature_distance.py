"""The Fréchet distance is that of the formula, and falls out of an evaluation with pictures beside it."""

import base64

import numpy as np
import pytest
import scipy.linalg
import torch

from configs.runtime.errors import InputError
from configs.schema.evaluation import QualityConfig, SuiteConfig
from eval.evaluation import evaluate
from eval.metrics.quality import featurised, frechet_distance
from eval.report.comparison import compare, render_comparison
from eval.report.page import render_html
from tests.support.evaluations import report_in, tiny_evaluation, write_suite

PIXEL = "data:image/png;base64," + base64.b64encode(b"a picture").decode()


def lengths(answer):
    return [len(answer), answer.count("w1")]


def picture(answer):
    return PIXEL


def nothing(answer):
    return "javascript:alert(1)"


def test_the_distance_is_that_of_two_normal_distributions():
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(300, 3, generator=generator, dtype=torch.float64)
    other = one @ torch.tensor([[2.0, 0.3, 0], [0, 1, 0], [0, 0.5, 0.7]], dtype=torch.float64) + 0.4
    means = one.mean(0) - other.mean(0)
    covariances = [np.cov(each.numpy().T) for each in (one, other)]
    expected = float(means @ means) + np.trace(sum(covariances) - 2 * scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real)
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-6)


def test_features_that_are_no_numbers_are_refused():
    for bad in (lambda answer: [float("nan")], lambda answer: "a", lambda answer: [1.0] * len(answer)):
        with pytest.raises(InputError, match=r"quality\.features: mine"):
            featurised("mine", bad, ["a", "bb"])


@pytest.fixture
def config(tiny_run, tmp_path):
    rows = [{"question": f"w{n} w{n + 1}", "answer": f"w{n} w1"} for n in range(6)]
    return tiny_evaluation(
        tiny_run,
        tmp_path / "evaluation",
        suite=SuiteConfig(path=write_suite(tmp_path / "suite.jsonl", rows).path),
        quality=QualityConfig(perplexity=False, features=f"{__name__}.lengths"),
        render=f"{__name__}.picture",
        num_rendered=2,
        baselines=[],
    )


def test_a_report_holds_the_distances_and_the_first_answers_as_pictures(config, monkeypatch):
    here = {name: globals()[name] for name in ("lengths", "picture", "nothing")}
    monkeypatch.setattr("eval.metrics.quality.import_function", lambda path, key: here[path.rpartition(".")[2]])
    monkeypatch.setattr("eval.metrics.quality.import_function", lambda path, key: here[path.rpartition(".")[2]])
    evaluate(config)
    report = report_in(config)
    distance = report.quality.feature_distance
    assert distance.between == pytest.approx(0, abs=1e-6)  # greedy answers are the same
    assert distance.autoregressive == pytest.approx(distance.speculative)
    assert distance.autoregressive > 0
    assert [each.speculative for each in report.rendered] == [PIXEL] * 2
    assert render_html(report).count(f'src="{PIXEL}"') == 4
    assert render_comparison(compare([("a", report), ("b", report)])).count(f'src="{PIXEL}"') == 6
    with pytest.raises(InputError, match="must return a data URL"):
        evaluate(config.model_copy(update={"render": f"{__name__}.nothing"}))

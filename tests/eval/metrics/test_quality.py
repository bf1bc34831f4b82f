"""What answers are worth: perplexity against a naive reference, scores and distances by hand, the user's functions."""

import base64
import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch

from configs.runtime.errors import InputError
from configs.schema.evaluation import EvalConfig, QualityConfig, SuiteConfig
from distill.generation.prompts import Prompt
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Generation
from eval.evaluation import evaluate
from eval.metrics.quality import Quality, featurised, frechet_distance, sums_by_prompt, unseen_change
from eval.metrics.tally import Tally
from eval.report.comparison import compare, render_comparison
from eval.report.page import render_html
from eval.report.sections import QualitySection
from tests.support.evaluations import report_in, tiny_evaluation, write_suite

PIXEL = "data:image/png;base64," + base64.b64encode(b"a picture").decode()
MODULE = f'''
import numpy as np
NUMBER = 3
def length(prompt, answer, reference): return len(answer)
def is_right(prompt, answer, reference): return answer == reference
def numpy_number(prompt, answer, reference): return np.float32(0.5)
def nothing(prompt, answer, reference): return None
def endless(prompt, answer, reference): return float("nan")
def two_arguments(prompt, answer): return 0
def failing(prompt, answer, reference): return 1 / 0
def lengths(answer): return [len(answer), answer.count("w1")]
def picture(answer): return "{PIXEL}"
def script(answer): return "javascript:alert(1)"
'''


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


def answer(number, mode, tokens, stop_reason="eos", turn=0):
    return Generation(
        prompt_id=f"q{number}",
        category="maths",
        mode=mode,
        prompt_tokens=(7, 8, 9 + number),
        tokens=tuple(tokens),
        rounds=(),
        stop_reason=stop_reason,
        turn=turn,
    )


def tally_of(pairs, **changed):
    """Count pairs of answers (plain, speculative) to q0, q1, ..., each given as tokens."""
    tally = Tally(3)
    for number, pair in enumerate(pairs):
        both = zip((AUTOREGRESSIVE, SPECULATIVE), pair, strict=True)
        tally.add([answer(number, mode, tokens, **changed) for mode, tokens in both])
    return tally


def judge(target, pairs, quality, answers=None, **changed):
    prompts = [
        Prompt(prompt_id=f"q{n}", category="maths", turns=("How many?",), answer=None if answers is None else answers[n])
        for n in range(len(pairs))
    ]
    config = EvalConfig(quality=quality, bootstrap_samples=200)
    return Quality(config, prompts).judge(target, tally_of(pairs, **changed))


def naive_nats(target, prompt, tokens):
    """Ask the model token by token, in float64."""
    nats = 0.0
    for position, token in enumerate(tokens):
        ids = torch.tensor([[*prompt, *tokens[:position]]])
        logits = target.model(input_ids=ids, use_cache=False).logits[0, -1].detach().double()
        nats -= float(logits[token] - logits.logsumexp(-1))
    return nats


def test_perplexity_is_that_of_a_loop_over_tokens_pooled_over_all_answers(target):
    pairs = [((11, 12, 13, 1), (11, 14, 1)), ((20, 21), (20, 22, 23, 24, 25)), ((30, 1), (30, 1))]

    found = judge(target, pairs, QualityConfig())["perplexity"]

    for side, name in enumerate(("autoregressive", "speculative")):
        nats = sum(naive_nats(target, (7, 8, 9 + n), pair[side]) for n, pair in enumerate(pairs))
        assert found[name] == pytest.approx(math.exp(nats / sum(len(pair[side]) for pair in pairs)), rel=1e-5)
    assert found["ratio"] == pytest.approx(found["speculative"] / found["autoregressive"])
    assert found["ratio_ci"][0] <= found["ratio"] <= found["ratio_ci"][1]


def test_exact_match_counts_each_mode_s_right_answers(target, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(type(tiny_tokenizer), "decode", lambda self, tokens, **settings: f"It is {tokens[-1]}.")
    pairs = [((3, 10), (3, 10)), ((3, 11), (3, 12)), ((3, 12), (3, 13)), ((3, 1), (3, 13))]

    found = judge(target, pairs, QualityConfig(perplexity=False, exact_match="gsm8k"), ["10", "#### 11", "12", "#### 13"])

    score = found["scores"]["gsm8k"]
    assert found["perplexity"] is None
    assert (score["autoregressive"], score["speculative"]) == (0.75, 0.5)
    assert (score["difference"], score["num_changed"]) == (-0.25, 3)
    assert score["difference_ci"][0] <= -0.25 <= score["difference_ci"][1]
    QualitySection.model_validate(found)


def test_failed_answers_have_no_score_and_are_counted_as_cut_ones_are(target):
    pairs = [((11, 12), (11, 12))]

    failed = judge(target, pairs, QualityConfig(), stop_reason="error")
    cut = judge(target, pairs, QualityConfig(), stop_reason="length")

    assert (failed["num_answers"], failed["num_failed"], failed["perplexity"], failed["scores"]) == (0, 1, None, {})
    assert (cut["num_answers"], cut["num_failed"], cut["num_cut"]) == (1, 0, 1)


def test_turns_of_one_prompt_are_one_cluster():
    pairs = [(answer(0, mode, (3,), turn=turn),) * 2 for turn in (0, 1) for mode in (SPECULATIVE,)]

    columns = sums_by_prompt([*pairs, (answer(1, SPECULATIVE, (3,)),) * 2], [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)])

    assert [column.tolist() for column in columns] == [[4.0, 5.0], [6.0, 6.0]]


def test_no_change_seen_is_not_no_change_possible():
    """At the bound, a change would have stayed unseen with probability 2.5 %."""
    low, high = unseen_change(20, [0.0, 1.0, 1.0])

    assert low == -high
    assert (1 - high) ** 20 == pytest.approx(0.025)
    assert unseen_change(20, [0.0, 7.5]) is None


# --- functions of the user's --------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that can be imported, which holds `MODULE`."""
    (tmp_path / "my_scorers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_scorers"


PROMPT = Prompt(prompt_id="q0", category="maths", turns=("How many?",), answer="#### 4")


def quality_of(prompts=(PROMPT,), **settings):
    return Quality(EvalConfig(quality=QualityConfig(**settings)), prompts)


def test_scorers_are_called_with_prompt_answer_and_reference(module):
    names = [f"{module}.{name}" for name in ("length", "is_right", "numpy_number")]
    quality = quality_of(scorers=names, exact_match="gsm8k")
    assert list(quality.scorers) == ["gsm8k", *names]
    assert [quality.score(name, PROMPT, 0, "#### 4") for name in quality.scorers] == [1.0, 6.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nosuch_module.score", "cannot be imported: ModuleNotFoundError: No module named 'nosuch_module'; it must be"),
        ("my_scorers.nosuch", "my_scorers.nosuch cannot be imported: AttributeError"),
        ("my_scorers.NUMBER", "my_scorers.NUMBER is a int, not a function"),
        ("my_scorers.nothing", "on the answer '' to the prompt 'How many?' returned None; a scorer returns a finite number"),
        ("my_scorers.endless", "returned nan"),
        ("my_scorers.two_arguments", "failed: TypeError: two_arguments() takes 2 positional arguments but 3 were given"),
        ("my_scorers.failing", "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_scorer_is_refused_before_anything_is_decoded(module, name, complaint):
    with pytest.raises(InputError, match=re.escape(complaint)):
        quality_of(scorers=[name])


@pytest.mark.parametrize("reference", [None, "none"])
def test_exact_match_needs_a_reference_with_a_number_for_every_prompt(reference):
    without = Prompt(prompt_id="q2", category="maths", turns=("And how many less?",), answer=reference)
    with pytest.raises(InputError, match=r"scorer gsm8k .* 'And how many less\?' failed: .* no number in"):
        quality_of([PROMPT, without], exact_match="gsm8k")


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
        with pytest.raises(InputError, match=r"quality\.features: own\.counts "):
            featurised("own.counts", bad, ["a", "bb"])


def test_features_may_come_as_an_iterator():
    assert featurised("own.counts", lambda answer: (float(ord(each)) for each in answer), ["ab", "cd"]).shape == (2, 2)


def test_an_evaluation_reports_scores_distances_joules_or_why_not_and_pictures(tiny_run, tmp_path, module):
    rows = [{"question": f"w{n} w{n + 1}", "answer": f"So it is\n#### {n}"} for n in range(4)]
    config = tiny_evaluation(
        tiny_run,
        tmp_path / "evaluation",
        suite=SuiteConfig(path=write_suite(tmp_path / "suite.jsonl", rows).path),
        quality=QualityConfig(exact_match="gsm8k", features=f"{module}.lengths"),
        render=f"{module}.picture",
        num_rendered=2,
        baselines=[],
        energy=True,
    )
    evaluate(config)
    report = report_in(config)
    quality, energy = report.quality, report.energy
    assert (energy.source is None) == (energy.reason is not None) == (energy.joules_per_token_ratio is None)
    assert (quality.num_answers, quality.num_identical) == (4, 4)
    assert (quality.perplexity.ratio, quality.scores["gsm8k"].num_changed) == (1.0, 0)
    assert 1.0 < quality.perplexity.autoregressive < 64.0
    assert "perplexity" in (Path(config.output) / "report.md").read_text()
    distance = quality.feature_distance
    assert distance.between == pytest.approx(0, abs=1e-6)  # greedy answers are the same
    assert distance.autoregressive == pytest.approx(distance.speculative)
    assert distance.autoregressive > 0
    assert [each.speculative for each in report.rendered] == [PIXEL] * 2
    assert render_html(report).count(f'src="{PIXEL}"') == 4
    page = render_comparison(compare([("a", report), ("b", report)]))
    assert page.count(f'src="{PIXEL}"') == 6
    assert "Fréchet distance from the references" in page
    with pytest.raises(InputError, match="must return a data URL"):
        evaluate(config.model_copy(update={"render": f"{module}.script"}))

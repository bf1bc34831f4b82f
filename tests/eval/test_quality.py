"""What answers are worth: perplexity against a naive reference, exact match by hand, the number a text comes to."""

import math
from decimal import Decimal
from pathlib import Path

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.evaluation import QualityConfig, SuiteConfig
from distill.generation.prompts import Prompt
from eval.acceptance import Tally
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Generation
from eval.evaluation import evaluate
from eval.quality import check_references, compare_perplexity, final_number, judge_quality, unseen_change
from eval.report.schema import QualitySection
from tests.support.evaluations import report_in, tiny_evaluation, write_suite

EXACT = QualityConfig(perplexity=False, exact_match="gsm8k")


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


def answer(number, mode, tokens, stop_reason="eos", turn=0):
    labels = {"prompt_id": f"q{number}", "category": "maths", "mode": mode, "stop_reason": stop_reason, "turn": turn}
    return Generation(prompt_tokens=(7, 8, 9 + number), tokens=tuple(tokens), rounds=(), **labels)


def judge(target, pairs, quality, references=None, **changed):
    """Judge pairs of answers (plain, speculative) to q0, q1, ..., each given as tokens."""
    tally, prompts = Tally(3), []
    for number, pair in enumerate(pairs):
        both = zip((AUTOREGRESSIVE, SPECULATIVE), pair, strict=True)
        tally.add([answer(number, mode, tokens, **changed) for mode, tokens in both])
        reference = None if references is None else references[number]
        prompts.append(Prompt(prompt_id=f"q{number}", category="maths", turns=("How many?",), answer=reference))
    check_references(quality, prompts)
    found = judge_quality(target, tally, prompts, quality)
    return QualitySection.model_validate(found)


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
    found = judge(target, pairs, QualityConfig()).perplexity
    for side, name in enumerate(("autoregressive", "speculative")):
        nats = sum(naive_nats(target, (7, 8, 9 + n), pair[side]) for n, pair in enumerate(pairs))
        assert getattr(found, name) == pytest.approx(math.exp(nats / sum(len(pair[side]) for pair in pairs)), rel=1e-5)
    assert found.ratio == pytest.approx(found.speculative / found.autoregressive)
    assert found.ratio_ci[0] <= found.ratio <= found.ratio_ci[1]


def test_exact_match_counts_each_mode_s_right_answers(target, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(type(tiny_tokenizer), "decode", lambda self, tokens, **settings: f"It is {tokens[-1]}.")
    pairs = [((3, 10), (3, 10)), ((3, 11), (3, 12)), ((3, 12), (3, 13)), ((3, 1), (3, 13))]
    found = judge(target, pairs, EXACT, ["10", "#### 11", "12", "#### 13"])
    score = found.exact_match
    assert found.perplexity is None
    assert (score.autoregressive, score.speculative) == (0.75, 0.5)
    assert (score.difference, score.num_changed) == (-0.25, 3)
    assert score.difference_ci[0] <= -0.25 <= score.difference_ci[1]


def test_failed_answers_have_no_score_and_are_counted_as_cut_ones_are(target):
    pairs = [((11, 12), (11, 12))]
    failed, cut = (judge(target, pairs, QualityConfig(), stop_reason=reason) for reason in ("error", "length"))
    assert (failed.num_answers, failed.num_failed, failed.perplexity, failed.exact_match) == (0, 1, None, None)
    assert (cut.num_answers, cut.num_failed, cut.num_cut) == (1, 0, 1)


def test_turns_of_one_prompt_are_one_cluster(target):
    """Three turns of two prompts are two clusters, too few for an interval."""
    turns = [(answer(0, AUTOREGRESSIVE, (11, 3)), answer(0, SPECULATIVE, (11, 4)))]
    turns.append((answer(0, AUTOREGRESSIVE, (12, 3), turn=1), answer(0, SPECULATIVE, (12, 5), turn=1)))
    others = [(answer(number, AUTOREGRESSIVE, (3,)),) * 2 for number in (1, 2)]
    two, three = (compare_perplexity(target, [*turns, *others[:count]]) for count in (1, 2))
    assert two["ratio_ci"] is None
    assert three["ratio_ci"] is not None


def test_no_change_seen_is_not_no_change_possible():
    """At the bound, a change would have stayed unseen with probability 2.5 %."""
    low, high = unseen_change(20)
    assert low == -high
    assert (1 - high) ** 20 == pytest.approx(0.025)


@pytest.mark.parametrize("changes", [{"answer": None}, {"answer": "none"}, {"turns": ("How many?", "And less?")}])
def test_exact_match_needs_a_reference_with_a_number_for_every_prompt(changes):
    prompt = Prompt(**{"prompt_id": "q2", "category": "maths", "turns": ("How many?",), "answer": "#### 4"} | changes)
    with pytest.raises(InputError, match=r"quality.exact_match.*'q2'"):
        check_references(EXACT, [prompt])


def test_an_evaluation_reports_quality_and_joules_or_why_not(tiny_run, tmp_path):
    rows = [{"question": f"w{n} w{n + 1}", "answer": f"So it is\n#### {n}"} for n in range(4)]
    config = tiny_evaluation(
        tiny_run,
        tmp_path / "evaluation",
        suite=SuiteConfig(path=write_suite(tmp_path / "suite.jsonl", rows).path, column="question"),
        quality=QualityConfig(exact_match="gsm8k"),
        baselines=[],
        energy=True,
    )
    evaluate(config)
    report = report_in(config)
    assert (report.energy.reason is None) != (report.energy.joules_per_token is None)
    quality = report.quality
    assert (quality.num_answers, quality.num_identical) == (4, 4)  # greedy answers are the same
    assert (quality.perplexity.ratio, quality.exact_match.num_changed) == (1.0, 0)
    assert 1.0 < quality.perplexity.autoregressive < 64.0
    assert "perplexity" in (Path(config.output) / "report.md").read_text()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She sold <<48+24=72>>72 clips.\n#### 1,250.50", "1250.5"),
        ("It fell by 4 to -4 °C", "-4"),
        ("10-3", "3"),
        ("Twelve.", None),
        ("9" * 5000, None),
    ],
)
def test_the_number_that_a_text_comes_to_is_its_last(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))

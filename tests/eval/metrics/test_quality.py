"""What answers are worth: perplexity against a naive reference, scores by hand, and the change between the two modes."""

import json
import math
from pathlib import Path

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig, LosslessConfig, QualityConfig, SuiteConfig
from configs.schema.target import TargetConfig
from distill.generation.prompts import Prompt
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Generation
from eval.evaluation import evaluate
from eval.metrics.quality import Quality, sums_by_prompt, unseen_change
from eval.metrics.tally import Tally
from eval.report.answer_sections import QualitySection
from eval.report.schema import load_report


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


# --- in an evaluation ---------------------------------------------------------------------------------------------


@pytest.fixture
def config(tiny_run, tmp_path):
    suite = tmp_path / "suite.jsonl"
    rows = [{"question": f"w{n} w{n + 1}", "answer": f"So it is\n#### {n}"} for n in range(4)]
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvalConfig(
        target=TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"),
        draft=str(tiny_run / "artifact"),
        suite=SuiteConfig(path=str(suite)),
        decode=DecodeConfig(num_speculative_tokens=2, max_new_tokens=6),
        repeats=1,
        baselines=[],
        lossless=LosslessConfig(),
        quality=QualityConfig(exact_match="gsm8k"),
        bootstrap_samples=50,
        output=str(tmp_path / "evaluation"),
    )


def test_an_evaluation_of_gsm8k_reports_perplexity_exact_match_and_joules_or_why_not(config):
    evaluate(config.model_copy(update={"energy": True}))

    report = load_report(Path(config.output) / "report.json")
    quality, energy = report.quality, report.energy
    assert (energy.source is None) == (energy.reason is not None) == (energy.joules_per_token_ratio is None)
    assert (quality.num_answers, quality.num_identical) == (4, 4)
    assert quality.perplexity.ratio == 1.0
    assert 1.0 < quality.perplexity.autoregressive < 64.0
    assert quality.scores["gsm8k"].num_changed == 0
    assert "perplexity" in (Path(config.output) / "report.md").read_text()

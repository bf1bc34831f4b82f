"""Later turns: asked after the plain answers in every mode, listed as failed where they cannot be asked."""

import pytest

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig
from distill.generation.prompts import Prompt
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Generation
from eval.evaluation import evaluate
from eval.measure.suite import Turns
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup
from scripts.lab.bench.turns import measure
from tests.support.evaluations import report_in, tiny_evaluation, write_suite

MODES = [AUTOREGRESSIVE, SPECULATIVE, "prompt_lookup"]


def prompt(*turns, name="q0", history=()):
    return Prompt(prompt_id=name, category="c", turns=turns, history=history)


def answer(*tokens, turn=0, name="q0", stop_reason="length"):
    return Generation(
        prompt_id=name,
        category="c",
        mode=AUTOREGRESSIVE,
        prompt_tokens=(),
        tokens=tokens,
        rounds=(),
        stop_reason=stop_reason,
        turn=turn,
    )


@pytest.fixture
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


def ids(target, text):
    return target.tokenizer.convert_tokens_to_ids(text.split())


def test_a_later_turn_follows_the_answers_before_it(target):
    system = {"role": "system", "content": "w9"}
    turns = Turns(target, [prompt("w1", "w2", "w3", history=(system,))])
    (second,), lost = turns.follow([answer(*ids(target, "w5 w6 <end>"))])
    assert (second.prompt_id, second.turn, lost) == ("q0", 1, [])
    text = "<system> w9 <end> <user> w1 <end> <assistant> w5 w6 <end> <user> w2 <end> <assistant>"
    assert list(second.tokens) == ids(target, text)
    (third,), _ = turns.follow([answer(*ids(target, "w7"), turn=1)])
    assert list(third.tokens) == ids(target, f"{text} w7 <end> <user> w3 <end> <assistant>")
    assert turns.follow([answer(*ids(target, "w8"), turn=2)]) == ([], [])


@pytest.mark.parametrize(
    ("answered", "reasons"),
    [
        (answer(stop_reason="non_finite"), ["after_a_failed_turn", "after_a_failed_turn"]),
        (answer(*[7] * 250), ["no_room_in_context", "after_a_failed_turn"]),
    ],
)
def test_a_turn_that_cannot_be_asked_is_lost_with_those_behind_it(target, answered, reasons):
    requests, lost = Turns(target, [prompt("w1", "w2", "w3")]).follow([answered])
    assert requests == []
    assert [(each.turn, each.stop_reason) for each in lost] == list(zip((1, 2), reasons, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_mode_reads_the_same_text_in_every_turn(target, tiny_llama, temperature):
    # When sampling, the draft's own answers differ from the plain ones; none of them is read by anybody.
    turns = Turns(target, [prompt("w1", "w2", "w3", name=name) for name in ("a", "b", "c")])
    config = EvalConfig(
        decode=DecodeConfig(num_speculative_tokens=2, max_new_tokens=6, batch_size=2, temperature=temperature), repeats=2
    )
    proposers = {SPECULATIVE: DraftLM(tiny_llama(seed=2), 64), "prompt_lookup": PromptLookup(target.device)}

    records = measure(target, turns.first, config, proposers, follow=turns.follow)

    by_place = {}
    for each in records.generations:
        by_place.setdefault((each.prompt_id, each.turn), []).append(each)
    assert sorted(by_place) == [(name, turn) for name in "abc" for turn in range(3)]
    for each in by_place.values():
        assert [generation.mode for generation in each] == MODES
        assert len({generation.prompt_tokens for generation in each}) == 1
    plain = {(each.prompt_id, each.turn): each for each in records.of(AUTOREGRESSIVE)}
    spoken = target.tokenizer.decode(plain["a", 0].tokens, skip_special_tokens=True)
    assert list(plain["a", 1].prompt_tokens) == ids(
        target, f"<user> w1 <end> <assistant> {spoken} <end> <user> w2 <end> <assistant>"
    )
    assert [timing.prompt_ids for timing in records.timings] == [("a", "b")] * 18 + [("c",)] * 18


# --- in a whole evaluation ----------------------------------------------------------------------------------------


@pytest.fixture
def config(tiny_run, tmp_path):
    rows = [{"question_id": f"q{n}", "category": "chat", "turns": ["w1", f"w{n}", "w3"][: n + 1]} for n in range(3)]
    return tiny_evaluation(tiny_run, tmp_path / "evaluation", suite=write_suite(tmp_path / "suite.jsonl", rows))


def test_a_report_counts_all_turns_of_a_prompt_as_one_prompt(config):
    assert evaluate(config) == 0
    report = report_in(config)
    prompts = report.prompts
    assert (prompts.num_asked, prompts.num_turns, prompts.num_prompts) == (3, 6, 3)
    assert prompts.failed == report.warnings == []
    assert report.by_category["chat"].num_prompts == 3
    assert report.acceptance.per_prompt.keys() == {"q0", "q1", "q2"}
    committed, rounds = map(sum, zip(*report.acceptance.per_prompt.values(), strict=True))
    assert (committed, rounds) == (report.acceptance.num_tokens, report.acceptance.num_rounds)
    assert report.lossless.verdict == "lossless"
    assert report.speed.num_batches == 2
    shown = [sample for side in report.samples.values() for sample in side]
    assert any(sample.prompt_id.endswith(", turn 2") for sample in shown)

"""Suites: read from files and data sets, a few prompts of them chosen, several in one run, later turns after plain answers."""

import hashlib
from collections import Counter
from pathlib import Path

import datasets
import pytest
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.runtime.files import CHECKOUT
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig, SuiteConfig
from distill.generation.prompts import Prompt
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Generation, read_records
from eval.evaluation import evaluate
from eval.measure.suite import Turns, load_suite
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup
from tests.support.evaluations import measure, report_in, tiny_evaluation, write_suite

HOUSE = "eval/suites/house64.jsonl"
CATEGORIES = ["writing", "coding", "maths", "reasoning", "extraction", "translation", "summarising", "chat"]


def test_the_suite_that_ships_has_eight_prompts_of_each_of_eight_categories_and_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    suite = load_suite(SuiteConfig(path=HOUSE))
    assert (suite.source, suite.sha256) == (HOUSE, hashlib.sha256((CHECKOUT / HOUSE).read_bytes()).hexdigest())
    assert Counter(prompt.category for prompt in suite.prompts) == dict.fromkeys(CATEGORIES, 8)
    assert list(dict.fromkeys(prompt.category for prompt in suite.prompts)) == CATEGORIES
    assert len(set(suite.ids)) == 64
    assert (suite.warnings, suite.format) == ((), "turns")


def test_a_few_prompts_are_spread_evenly_over_the_categories():
    chosen = load_suite(SuiteConfig(num_prompts=20)).prompts
    counts = Counter(prompt.category for prompt in chosen)
    assert list(counts) == CATEGORIES
    assert set(counts.values()) == {2, 3}
    assert load_suite(SuiteConfig(num_prompts=8)).ids == [f"{name}-1" for name in CATEGORIES]
    assert len(load_suite(SuiteConfig(num_prompts=100)).ids) == 64  # all there are


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (["a", "a"], r"the id '7' was used before"),
        (["a", "b"], r"suite\.jsonl, line 2: the id '7' was used before \(.* line 1\)"),
        (None, r"suite not found: .*suite\.jsonl"),
    ],
)
def test_a_file_that_is_no_suite_is_refused(tmp_path, rows, complaint):
    path = tmp_path / "suite.jsonl"
    if rows is not None:
        write_suite(path, [{"question_id": 7, "turns": [text]} for text in rows])
    with pytest.raises(InputError, match=complaint):
        load_suite(SuiteConfig(path=str(path)))


def test_a_system_message_goes_before_prompts_that_have_none_and_makes_another_suite(tmp_path):
    own = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    write_suite(tmp_path / "suite.jsonl", [{"messages": own[1:]}, {"messages": own, "id": "own"}])
    plain, changed = (
        load_suite(SuiteConfig(path=str(tmp_path / "suite.jsonl"), system=system)) for system in (None, "Be kind.")
    )
    said = [[each["content"] for each in prompt.messages] for prompt in changed.prompts]
    assert said == [["Be kind.", "Hi"], ["Be short.", "Hi"]]
    assert plain.sha256 != changed.sha256
    assert [prompt.user_texts for prompt in plain.prompts] == [prompt.user_texts for prompt in changed.prompts]


# --- data sets ----------------------------------------------------------------------------------------------------


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    """A data set of questions with answers, saved to a folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = {"question": ["one?", "two?", "three?"], "answer": ["#### 1", "#### 2", "#### 3"], "level": [1, 2, 3]}
    datasets.DatasetDict(test=datasets.Dataset.from_dict(rows)).save_to_disk(tmp_path / "set")
    return tmp_path / "set"


def test_a_data_set_is_read_in_the_format_of_its_rows_with_its_references(data_set):
    suite = load_suite(SuiteConfig(path=str(data_set), column="question"))
    assert (suite.format, suite.ids) == ("column", ["row-0", "row-1", "row-2"])
    assert [(prompt.turns, prompt.answer) for prompt in suite.prompts][1] == (("two?",), "#### 2")


def test_a_data_set_is_identified_by_what_it_asks_and_not_by_its_files(data_set, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    rows = [{"question": f"{word}?", "answer": f"#### {n}"} for n, word in enumerate(["one", "two", "three"], 1)]
    write_suite(folder / "test.jsonl", rows)
    packed_otherwise, changed = load_suite(SuiteConfig(path=str(folder), column="question")), tmp_path / "changed"
    datasets.Dataset.from_dict({"question": ["one!"], "answer": ["#### 1"]}).save_to_disk(changed)
    assert packed_otherwise.sha256 == load_suite(SuiteConfig(path=str(data_set), column="question", num_prompts=1)).sha256
    assert load_suite(SuiteConfig(path=str(changed), column="question")).sha256 != packed_otherwise.sha256


# --- turns --------------------------------------------------------------------------------------------------------

MODES = [AUTOREGRESSIVE, SPECULATIVE, "prompt_lookup"]


def prompt(*turns, name="q0", history=()):
    return Prompt(prompt_id=name, category="c", turns=turns, history=history)


def answer(*tokens, turn=0, stop_reason="length"):
    labels = {"prompt_id": "q0", "category": "c", "mode": AUTOREGRESSIVE, "stop_reason": stop_reason, "turn": turn}
    return Generation(prompt_tokens=(), tokens=tokens, rounds=(), **labels)


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
        (answer(*[7] * 250), ["no_room_in_context", "no_room_in_context"]),
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


# --- several suites in one run -------------------------------------------------------------------------------------


@pytest.fixture
def two_suites(tiny_run, tmp_path):
    """A suite at home and one abroad, whose prompts have the same ids; one of those has two turns."""
    home = write_suite(tmp_path / "home.jsonl", [{"question_id": f"q{n}", "turns": [f"w{n}"]} for n in range(5)])
    rows = [{"question_id": f"q{n}", "category": f"c{n % 2}", "turns": [f"w{n} w9 w{n}", "w4"][: 1 + n % 2]} for n in range(3)]
    abroad = write_suite(tmp_path / "abroad.jsonl", rows)
    return tiny_evaluation(tiny_run, tmp_path / "evaluation", suite=home, suites=[abroad])


def test_each_suite_has_the_numbers_that_it_has_alone(two_suites, tmp_path):
    assert evaluate(two_suites) == 0
    report = report_in(two_suites)
    assert report.prompts.suite == "home"
    assert list(report.suites) == ["abroad"]
    records = read_records(Path(two_suites.output) / "records.jsonl").generations
    assert {(each.suite, each.prompt_id.startswith("abroad/")) for each in records} == {("home", False), ("abroad", True)}
    for suite, section in ((two_suites.suite, report), (two_suites.suites[0], report.suites["abroad"])):
        alone = two_suites.model_copy(update={"suite": suite, "suites": [], "output": str(tmp_path / f"alone-{suite.label}")})
        evaluate(alone)
        expected = report_in(alone)
        assert section.acceptance.tokens_per_target_step == expected.acceptance.tokens_per_target_step
        assert section.prompts.sha256 == expected.prompts.sha256
        assert section.prompts.num_turns == expected.prompts.num_turns
        assert section.by_category.keys() == expected.by_category.keys()
        assert section.baselines.keys() == expected.baselines.keys()
        assert len(section.speed.per_batch) == len(expected.speed.per_batch)  # no batch holds prompts of both
    assert report.lossless.checked_prompts == 5 + 4


def test_without_a_suite_the_first_of_several_stands_in_its_place_and_names_must_differ():
    several = [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl", "name": "other"}]
    config = EvalConfig.model_validate({"suites": several})
    assert [each.label for each in config.all_suites] == ["x", "other"]
    assert EvalConfig.model_validate(config.model_dump()) == config
    with pytest.raises(ValidationError, match="suites must have different names"):
        EvalConfig(suites=[SuiteConfig()], suite=SuiteConfig())

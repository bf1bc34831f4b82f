"""Suites: the one that ships, and choosing a few prompts of a large one."""

import hashlib
import json
from collections import Counter

import datasets
import pytest

from configs.runtime.errors import InputError
from configs.runtime.files import CHECKOUT
from configs.schema.evaluation import SuiteConfig
from eval.measure.suite import load_suite
from tests.support.evaluations import write_suite

HOUSE = "eval/suites/house64.jsonl"
CATEGORIES = ["writing", "coding", "maths", "reasoning", "extraction", "translation", "summarising", "chat"]


@pytest.fixture
def suite_file(tmp_path):
    rows = [
        {"question_id": f"{name}-{n}", "category": name, "turns": [f"{name}{n}", "then"]} for n, name in enumerate("aaaabc")
    ]
    write_suite(tmp_path / "suite.jsonl", rows)
    return tmp_path / "suite.jsonl"


def test_the_suite_that_ships_has_eight_prompts_of_each_of_eight_categories_and_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    suite = load_suite(SuiteConfig(path=HOUSE))
    assert (suite.source, suite.sha256) == (HOUSE, hashlib.sha256((CHECKOUT / HOUSE).read_bytes()).hexdigest())
    assert Counter(prompt.category for prompt in suite.prompts) == dict.fromkeys(CATEGORIES, 8)
    assert list(dict.fromkeys(prompt.category for prompt in suite.prompts)) == CATEGORIES
    assert len(set(suite.ids)) == 64
    assert len({prompt.user_text for prompt in suite.prompts}) == 64
    assert suite.warnings == ()
    assert suite.format == "turns"


def test_a_few_prompts_are_spread_evenly_over_the_categories():
    chosen = load_suite(SuiteConfig(num_prompts=20)).prompts
    counts = Counter(prompt.category for prompt in chosen)
    assert list(counts) == CATEGORIES
    assert set(counts.values()) == {2, 3}
    assert load_suite(SuiteConfig(num_prompts=8)).ids == [f"{name}-1" for name in CATEGORIES]


@pytest.mark.parametrize(("max_turns", "left_out"), [(None, 0), (1, 6), (2, 0)])
def test_later_turns_can_be_left_out_and_are_counted(suite_file, max_turns, left_out):
    suite = load_suite(SuiteConfig(path=str(suite_file), max_turns=max_turns))
    assert {len(prompt.turns) for prompt in suite.prompts} == {max_turns or 2}
    assert [warning.split()[0] for warning in suite.warnings] == [str(left_out)] * (left_out > 0)


@pytest.mark.parametrize(
    ("rows", "num_prompts", "complaint"),
    [
        (["a"], 7, r"suite\.num_prompts: 7 asked for, but .* holds 1"),
        (["a", "a"], None, r"the id '7' was used before"),
        (["a", "b"], None, r"suite\.jsonl, line 2: the id '7' was used before \(.* line 1\)"),
        (None, None, r"suite not found: .*suite\.jsonl"),
    ],
)
def test_a_file_that_is_no_suite_is_refused(tmp_path, rows, num_prompts, complaint):
    path = tmp_path / "suite.jsonl"
    if rows is not None:
        write_suite(path, [{"question_id": 7, "turns": [text]} for text in rows])
    with pytest.raises(InputError, match=complaint):
        load_suite(SuiteConfig(path=str(path), num_prompts=num_prompts))


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


ROWS = {
    "turns": {"turns": ["How many?"], "reference": ["#### 4"]},
    "gsm8k": {"question": "How many?", "answer": "#### 4"},
    "humaneval": {"task_id": "HumanEval/3", "prompt": "def f(x):\n"},
}


@pytest.mark.parametrize(
    ("name", "category", "reference"),
    [("turns", "uncategorised", "#### 4"), ("gsm8k", "gsm8k", "#### 4"), ("humaneval", "humaneval", None)],
)
def test_references_and_categories_come_with_the_format(tmp_path, name, category, reference):
    (tmp_path / "suite.jsonl").write_text(json.dumps(ROWS[name]))
    suite = load_suite(SuiteConfig(path=str(tmp_path / "suite.jsonl")))
    assert suite.format == name
    assert (suite.prompts[0].category, suite.prompts[0].answer) == (category, reference)


# --- data sets ----------------------------------------------------------------------------------------------------


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    """A data set of questions with answers, saved to a folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = {"question": ["one?", "two?", "three?"], "answer": ["#### 1", "#### 2", "#### 3"], "level": [1, 2, 3]}
    datasets.DatasetDict(test=datasets.Dataset.from_dict(rows)).save_to_disk(tmp_path / "set")
    return tmp_path / "set"


def test_a_data_set_is_read_in_the_format_of_its_rows(data_set):
    suite = load_suite(SuiteConfig(path=str(data_set)))
    assert suite.format == "gsm8k"
    assert suite.ids == ["row-0", "row-1", "row-2"]
    assert [(prompt.turns, prompt.answer) for prompt in suite.prompts][1] == (("two?",), "#### 2")


def test_a_data_set_is_identified_by_what_it_asks_and_not_by_its_files(data_set, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    rows = [{"question": f"{word}?", "answer": f"#### {n}"} for n, word in enumerate(["one", "two", "three"], 1)]
    write_suite(folder / "test.jsonl", rows)
    packed_otherwise, changed = load_suite(SuiteConfig(path=str(folder))), tmp_path / "changed"
    datasets.Dataset.from_dict({"question": ["one!"], "answer": ["#### 1"]}).save_to_disk(changed)
    assert packed_otherwise.sha256 == load_suite(SuiteConfig(path=str(data_set), num_prompts=1)).sha256
    assert load_suite(SuiteConfig(path=str(changed))).sha256 != packed_otherwise.sha256


def test_a_name_on_the_hub_is_looked_up_there(monkeypatch):
    asked = []

    def load_dataset(*arguments, **settings):
        asked.append((arguments, settings))
        return datasets.Dataset.from_dict({"task_id": ["HumanEval/0"], "prompt": ["def f():"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    suite = load_suite(SuiteConfig(path="openai/openai_humaneval", subset="plain"))
    assert asked == [(("openai/openai_humaneval", "plain"), {"split": "test", "revision": None})]
    assert (suite.format, suite.ids) == ("humaneval", ["HumanEval/0"])

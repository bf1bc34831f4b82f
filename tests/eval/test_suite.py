"""Suites: the one that ships, and choosing a few prompts of a large one."""

import hashlib
import json
from collections import Counter

import pytest

from configs.errors import InputError
from configs.schema import SuiteConfig
from eval.suite import CHECKOUT, load_suite

HOUSE = "eval/suites/house64.jsonl"
CATEGORIES = ["writing", "coding", "maths", "reasoning", "extraction", "translation", "summarising", "chat"]


@pytest.fixture
def suite_file(tmp_path):
    rows = [
        {"question_id": f"{name}-{n}", "category": name, "turns": [f"{name}{n}", "then"]} for n, name in enumerate("aaaabc")
    ]
    path = tmp_path / "suite.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_suite_that_ships_has_eight_prompts_of_each_of_eight_categories():
    suite = load_suite(SuiteConfig())
    assert Counter(prompt.category for prompt in suite.prompts) == dict.fromkeys(CATEGORIES, 8)
    assert suite.categories == CATEGORIES
    assert len(set(suite.ids)) == 64
    assert len({prompt.user_text for prompt in suite.prompts}) == 64
    assert suite.num_later_turns == 0


def test_it_is_found_from_any_folder_and_identified_by_its_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    suite = load_suite(SuiteConfig(path=HOUSE))
    assert suite.source == HOUSE
    assert suite.sha256 == hashlib.sha256((CHECKOUT / HOUSE).read_bytes()).hexdigest()


def test_a_few_prompts_are_spread_evenly_over_the_categories():
    chosen = load_suite(SuiteConfig(num_prompts=20)).prompts
    counts = Counter(prompt.category for prompt in chosen)
    assert list(counts) == CATEGORIES
    assert set(counts.values()) == {2, 3}
    assert load_suite(SuiteConfig(num_prompts=8)).ids == [f"{name}-1" for name in CATEGORIES]


def test_a_category_that_runs_out_leaves_its_place_to_the_others(suite_file):
    suite = load_suite(SuiteConfig(path=str(suite_file), num_prompts=5))
    assert suite.ids == ["a-0", "b-4", "c-5", "a-1", "a-2"]
    assert suite.num_later_turns == 5


def test_more_prompts_than_there_are_is_refused(suite_file):
    with pytest.raises(InputError, match=r"suite\.num_prompts: 7 asked for, but .* holds 6"):
        load_suite(SuiteConfig(path=str(suite_file), num_prompts=7))


def test_a_suite_that_asks_the_same_twice_is_refused(tmp_path):
    path = tmp_path / "suite.jsonl"
    path.write_text('{"turns": ["a"]}\n' * 2)
    with pytest.raises(InputError, match="holds the same prompt twice"):
        load_suite(SuiteConfig(path=str(path)))


def test_a_suite_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"suite not found: nowhere\.jsonl"):
        load_suite(SuiteConfig(path="nowhere.jsonl"))

"""What a row of each form asks, how forms are told apart, and what is refused by name."""

import pytest
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.evaluation import SuiteConfig
from eval.measure.suite import detect_format, to_prompt

ROWS = {
    "turns": {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["a", "b"]},
    "messages": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    "humaneval": {
        "task_id": "HumanEval/3",
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "canonical_solution": "    return x\n",
        "test": "assert f(1)",
    },
    "gsm8k": {"question": "How many?", "answer": "2 + 2 = 4\n#### 4"},
}


def parsed(row, number=0, *, column=None, format=None):
    format = format or ("column" if column else detect_format(row, "row 0"))
    return to_prompt(row, number, format=format, column=column, where="row 0")


def test_spec_bench_and_mt_bench_rows_keep_id_category_and_all_turns():
    prompt = parsed(ROWS["turns"])
    assert (prompt.prompt_id, prompt.category, prompt.turns) == ("81", "writing", ("Write.", "Again."))
    assert prompt.answer is None  # the list holds an answer for each turn


def test_a_single_turns_reference_is_kept_and_not_asked():
    assert parsed({"turns": ["How many?"], "reference": ["#### 4"]}).answer == "#### 4"
    gsm8k = parsed(ROWS["gsm8k"], 12)
    assert (gsm8k.prompt_id, gsm8k.category, gsm8k.turns) == ("row-12", "gsm8k", ("How many?",))
    assert gsm8k.answer == "2 + 2 = 4\n#### 4"


def test_a_humaneval_prompt_is_asked_as_it_stands():
    prompt = parsed(ROWS["humaneval"])
    assert (prompt.prompt_id, prompt.category, prompt.turns) == ("HumanEval/3", "humaneval", ("def f(x):\n",))


def test_a_chat_is_asked_up_to_its_last_user_message():
    prompt = parsed(ROWS["messages"])
    assert (prompt.messages, prompt.answer) == ([{"role": "user", "content": "Hi"}], "Hello")


@pytest.mark.parametrize(
    ("value", "turns"),
    [("Hi", ("Hi",)), (["Hi", "And?"], ("Hi", "And?")), ([{"role": "user", "content": "Hi"}], ("Hi",))],
)
def test_a_column_holds_a_text_turns_or_a_chat(value, turns):
    prompt = parsed({"asked": value, "prompt_id": "p7", "category": "odd"}, column="asked")
    assert (prompt.prompt_id, prompt.category, prompt.turns) == ("p7", "odd", turns)
    assert parsed({"asked": value}, 3, column="asked").prompt_id == "row-3"


def test_a_format_that_is_asked_for_goes_before_what_the_keys_say():
    both = {**ROWS["gsm8k"], "turns": ["Another question?"]}
    assert parsed(both).turns == ("Another question?",)
    assert parsed(both, format="gsm8k").turns == ("How many?",)


@pytest.mark.parametrize(
    ("row", "more", "complaint"),
    [
        ({"text": "Hi"}, {}, r"row 0: the keys text are those of no known format .* with suite\.column"),
        ({}, {}, r"row 0: the keys \(none\)"),
        ({"question": "How?"}, {"format": "gsm8k"}, "row 0: format gsm8k needs answer; the row has the keys question"),
        ({"task_id": "t", "prompt": " "}, {}, "row 0: a turn must be a text that is not blank"),
        ({"asked": None}, {"column": "asked"}, "row 0: a turn must be a text|row 0: turns must be a list"),
        ({"asked": "Hi", "category": 3}, {"column": "asked"}, "row 0: category must be a text, got 3"),
    ],
)
def test_a_row_that_asks_nothing_is_refused_by_name(row, more, complaint):
    with pytest.raises(InputError, match=complaint):
        parsed(row, **more)


@pytest.mark.parametrize("settings", [{"format": "column"}, {"format": "gsm8k", "column": "question"}])
def test_a_column_and_its_format_go_together(settings):
    with pytest.raises(ValidationError, match="column is"):
        SuiteConfig(**settings)

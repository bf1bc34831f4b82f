"""What a row of each format asks, how formats are told apart, and what is refused by name."""

import json

import pytest

from configs.runtime.errors import InputError
from configs.schema.data import RowFormat
from distill.generation.row_formats import KEYS, detect_format, read_row

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "1"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}

# Format -> a row of it, the turns that it asks, and its answer.
ROWS = {
    "turns": ({"turns": ["Hi", "And?"], "reference": ["a", "b"]}, ("Hi", "And?"), None),
    "messages": ({"messages": [PARTS, ASSISTANT]}, ("Hi",), "Hello"),
    "request": (
        {"request": {"model": "m", "messages": [PARTS], "stream": True}, "response": {"id": "r"}, "status": 200},
        ("Hi",),
        None,
    ),
    "batch": ({"custom_id": "1", "method": "POST", "url": "/v1", "body": {"messages": [USER]}}, ("Hi",), None),
    "sharegpt": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, ("Hi",), "Hello"),
    "humaneval": ({"task_id": "HumanEval/3", "prompt": "def f(x):\n", "test": "assert f(1)"}, ("def f(x):\n",), None),
    "gsm8k": ({"question": "How many?", "answer": "#### 4"}, ("How many?",), "#### 4"),
    "alpaca": ({"instruction": "Add.", "input": "2, 2", "output": "4"}, ("Add.\n\n2, 2",), "4"),
    "prompt_completion": ({"prompt": "Hi", "completion": "Hello"}, ("Hi",), "Hello"),
    "text": ({"text": "Hi"}, ("Hi",), None),
    "question": ({"question": "How?"}, ("How?",), None),
    "ids": ({"prompt_ids": [9, 0], "sample": 4, "answer_ids": [3, 2]}, ("9 0 #4",), "3 2"),
}


def parsed(row, format=None, **columns):
    format = format or detect_format(row, "row 0", "suite.column")
    return read_row(row, format, "row 0", setting="suite.column", **columns)


def test_the_config_names_every_format():
    assert set(RowFormat.__args__) == {"auto", *KEYS, "column"}
    assert list(ROWS) == list(KEYS)


@pytest.mark.parametrize("name", ROWS)
def test_each_format_is_known_by_its_keys_and_asks_its_prompt(name):
    row, turns, answer = ROWS[name]
    assert detect_format(row, "row 0", "suite.column") == name
    prompt = parsed({**row, "category": "odd"})
    assert (prompt.turns, prompt.answer, prompt.category) == (turns, answer, "odd")


def test_conversations_may_hold_messages_as_of_specforge_and_speculators():
    prompt = parsed({"id": "7", "conversations": [USER, ASSISTANT]})
    assert (prompt.turns, prompt.answer) == (("Hi",), "Hello")


def test_tools_beside_messages_are_the_prompts():
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"messages": [USER]}
    assert parsed(row | {"tools": tools}).tools == parsed(row | {"tools": json.dumps(tools)}).tools == tuple(tools)
    assert parsed(row | {"tools": tools}).prompt_id != parsed(row).prompt_id
    assert parsed({"request": row | {"tools": tools}}).tools == parsed({"body": row | {"tools": tools}}).tools == tuple(tools)
    assert parsed({"turns": ["Hi"], "tools": "hammer"}).tools == ()
    for wrong in ("hammer", [1], {"f": 1}):
        with pytest.raises(InputError, match=r"row 0: tools must be a list of objects"):
            parsed(row | {"tools": wrong})


@pytest.mark.parametrize("media", [None, ["/etc/hostname"]])
def test_a_key_media_in_a_rows_own_message_names_no_images(media):
    assert parsed({"messages": [{**USER, "media": media}]}) == parsed({"messages": [USER]})


def test_tools_stay_in_the_history():
    prompt = parsed({"messages": [USER, CALL, RESULT, ASSISTANT, {"role": "user", "content": "And?"}]})
    assert prompt.turns == ("And?",)
    (called,) = (message for message in prompt.history if "tool_calls" in message)
    assert prompt.history == (USER, {**called, "content": ""}, RESULT, ASSISTANT)


def test_a_chat_may_end_with_a_tools_result_and_its_answer_may_think_and_call_tools():
    asks = parsed({"messages": [USER, CALL, RESULT]})
    assert (asks.messages[-1], asks.user_texts, asks.opening) == (RESULT, ["Hi"], "Hi")
    assert asks.prompt_id != parsed({"messages": [USER, CALL, RESULT | {"tool_call_id": "2"}]}).prompt_id
    thinks = {"role": "assistant", "content": "4", "reasoning": "2 and 2"}
    prompt = parsed({"messages": [USER, CALL, RESULT, thinks]})
    assert (prompt.answer, prompt.answer_keys) == ("4", {"reasoning_content": "2 and 2"})
    calls = parsed({"messages": [USER, CALL]})
    assert (calls.answer, calls.answer_keys["tool_calls"][0]["function"]["arguments"]) == ("", {})


def test_arguments_of_a_tool_call_are_the_object_that_engines_give_to_the_template():
    def arguments(given, nested=True):
        call = {"name": "f", "arguments": given}
        message = {**CALL, "tool_calls": [{"id": "1", "function": call} if nested else call]}
        (read,) = parsed({"messages": [USER, message, RESULT, USER]}).history[1]["tool_calls"]
        return (read["function"] if nested else read)["arguments"]

    assert arguments('{"city": "Rome"}') == arguments({"city": "Rome"}) == arguments('{"city": "Rome"}', nested=False)
    assert arguments('{"city": "Rome"}') == {"city": "Rome"}
    assert arguments("no JSON") == "no JSON"
    assert arguments("[1]") == "[1]"


@pytest.mark.parametrize("row", [{"turns": ["Hi"]}, {"prompt": "Hi"}])
def test_an_empty_id_or_category_is_none(row):
    assert parsed({**row, "id": "", "category": ""}) == parsed(row)


@pytest.mark.parametrize(
    ("value", "turns"), [("Hi", ("Hi",)), (["Hi", "And?"], ("Hi", "And?")), ([USER], ("Hi",)), ([USER, ASSISTANT], ("Hi",))]
)
def test_a_column_holds_a_text_turns_or_a_chat(value, turns):
    prompt = parsed({"asked": value, "prompt_id": "p7"}, "column", column="asked")
    assert (prompt.prompt_id, prompt.turns) == ("p7", turns)


def test_a_second_column_holds_the_answer():
    row = {"asked": "Hi", "said": "Hello"}
    assert parsed(row, "column", column="asked", answer_column="said").answer == "Hello"
    with pytest.raises(InputError, match=r"row 0: no column 'told' \(suite\.column\); there are asked, said"):
        parsed(row, "column", column="asked", answer_column="told")


def test_a_format_that_is_asked_for_goes_before_what_the_keys_say():
    both = {"question": "How many?", "answer": "#### 4", "turns": ["Another question?"]}
    assert parsed(both).turns == ("Another question?",)
    assert parsed(both, "gsm8k").turns == ("How many?",)


@pytest.mark.parametrize(
    ("row", "format", "complaint"),
    [
        ({"body": {"input": "Hi"}}, None, r"row 0: body must hold the messages of a chat, got \"{'input': 'Hi'}\""),
        ({"turns": []}, None, "turns must be a list of at least one text"),
        ({"turns": ["a", " "]}, None, "a turn must be a text that is not blank"),
        ({"turns": ["a"], "question_id": [1]}, None, "question_id must be"),
        ({"turns": ["a"], "category": 3}, None, "category must be a text"),
        ({"messages": []}, None, "messages must be a list of at least one message"),
        ({"messages": [{"role": "user", "content": 3}]}, None, "a message must have a role and a content, both texts"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, None, "messages must end with a user message"),
        ({"asked": "Hi"}, None, r"row 0: the keys asked are those of no known format .* with suite\.column"),
        ({}, None, r"row 0: the keys \(none\)"),
        ({"question": "How?"}, "gsm8k", "row 0: format gsm8k needs answer; the row has the keys question"),
        ({"task_id": "t", "prompt": " "}, None, "row 0: messages must end with a user message that is not blank"),
        ({"conversations": [{"from": "human"}]}, None, r"row 0: conversations must be a list of \{from, value\} or"),
        ({"conversations": [{"from": ["human"], "value": "Hi"}]}, None, "row 0: conversations must be a list of"),
        ({"instruction": None, "input": "2, 2"}, None, r"row 0: instruction and input must be texts, got \[None, '2, 2'\]"),
        ({"messages": [{**USER, "content": [{"type": "text", "text": None}]}]}, None, "of type text must hold a text"),
        ({"messages": [{**USER, "content": [{"type": "image_url"}]}]}, None, "an image must be named by a path, a data URL"),
        ({"messages": [{**USER, "content": [{"type": "video"}]}]}, None, "of user has a part of type video; texts are"),
    ],
)
def test_a_row_that_asks_nothing_is_refused_by_name(row, format, complaint):
    with pytest.raises(InputError, match=complaint):
        parsed(row, format)

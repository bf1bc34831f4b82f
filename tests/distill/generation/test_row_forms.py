"""What a row of each form asks, and what is refused by name."""

import json

import pytest

from configs.runtime.errors import InputError
from distill.generation.row_forms import FORMS, detect_format, read_row

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "1"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}

# The key by which a row is known -> a row, the turns that it asks, and its answer.
ROWS = {
    "loss_mask": ({"input_ids": [9, 3, 2, 8, 4, 7], "loss_mask": [0, 1, 1, 0, 1, 0]}, ("8",), "4"),
    "turns": ({"turns": ["Hi", "And?"], "reference": ["a", "b"]}, ("Hi", "And?"), None),
    "messages": ({"messages": [PARTS, ASSISTANT]}, ("Hi",), "Hello"),
    "request": ({"request": {"model": "m", "messages": [PARTS]}, "response": {"id": "r"}}, ("Hi",), None),
    "body": ({"custom_id": "1", "method": "POST", "body": {"messages": [USER]}}, ("Hi",), None),
    "conversations": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        ("Hi",),
        "Hello",
    ),
    "prompt_ids": ({"prompt_ids": [9, 0], "sample": 4, "answer_ids": [3, 2]}, ("9 0 #4",), "3 2"),
    "prompt": ({"prompt": "Hi", "completion": "Hello"}, ("Hi",), None),
}


def parsed(row, format=None, **columns):
    format = format or detect_format(row, "row 0", "suite.column")
    return read_row(row, format, "row 0", setting="suite.column", **columns)


@pytest.mark.parametrize("key", ROWS)
def test_each_form_is_known_by_its_key_and_asks_its_prompt(key):
    assert list(ROWS) == [*FORMS, "prompt"]
    row, turns, answer = ROWS[key]
    if key == "conversations":  # of messages, too, as of SpecForge and speculators
        assert (parsed(row).turns, parsed(row).answer) == (parsed({"conversations": [USER, ASSISTANT]}).turns, "Hello")
    prompt = parsed({**row, "category": "odd"})
    assert (prompt.turns, prompt.answer, prompt.category) == (turns, answer, "odd")
    assert parsed({**row, "id": "", "category": ""}, default_id="row-0") == parsed(row, default_id="row-0")


def test_a_row_of_ids_is_a_chat_of_what_was_read_and_what_was_written():
    row, *_ = ROWS["loss_mask"]
    prompt, messages = parsed(row), [{"role": "user", "content": "9"}, {"role": "assistant", "content": "3 2"}]
    assert (prompt.of_ids, list(prompt.history)) == (True, messages)
    others = (
        {"token_ids": row["input_ids"], "loss_mask": [True, *row["loss_mask"][1:]]},
        {key: [each] for key, each in row.items()},
    )
    assert [parsed(other) for other in others] == [prompt, prompt]
    assert parsed({"messages": [*messages, USER | {"content": "8"}], "of_ids": True}) == prompt
    assert parsed(row | {"messages": [USER]}) == prompt


def test_tools_beside_messages_are_the_prompts():
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"messages": [USER]}
    assert parsed(row | {"tools": tools}).tools == parsed(row | {"tools": json.dumps(tools)}).tools == tuple(tools)
    assert parsed(row | {"tools": tools}).prompt_id != parsed(row).prompt_id
    assert parsed({"request": row | {"tools": tools}}).tools == parsed({"body": row | {"tools": tools}}).tools == tuple(tools)
    assert parsed({"turns": ["Hi"], "tools": "hammer"}).tools == ()


def test_a_chat_keeps_its_calls_of_tools_and_may_end_with_a_result_or_an_answer_that_thinks():
    prompt = parsed({"messages": [USER, CALL, RESULT, ASSISTANT, {"role": "user", "content": "And?"}]})
    (called,) = (message for message in prompt.history if "tool_calls" in message)
    assert prompt.history == (USER, {**called, "content": ""}, RESULT, ASSISTANT)
    assert (prompt.turns, prompt.messages[-1]["role"], prompt.user_text) == (("And?",), "user", "Hi\nAnd?")
    asks = parsed({"messages": [USER, CALL, RESULT]})
    assert (asks.messages[-1], asks.user_texts, asks.opening) == (RESULT, ["Hi"], "Hi")
    assert asks.prompt_id != parsed({"messages": [USER, CALL, RESULT | {"tool_call_id": "2"}]}).prompt_id
    prompt = parsed({"messages": [USER, CALL, RESULT, {"role": "assistant", "content": "4", "reasoning": "2 and 2"}]})
    assert (prompt.answer, prompt.answer_keys) == ("4", {"reasoning_content": "2 and 2"})
    calls = parsed({"messages": [USER, CALL | {"thinking": "f"}]})
    assert calls.answer_keys["reasoning_content"] == "f"
    sharegpt = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": '{"name": "f"}'}]}
    assert parsed(sharegpt).answer_keys["tool_calls"] == [{"type": "function", "function": {"name": "f"}}]
    assert parsed({"conversations": [*sharegpt["conversations"], {"from": "observation", "value": "4"}]}).messages[-1] == {
        "role": "tool",
        "content": "4",
    }
    assert (calls.answer, calls.answer_keys["tool_calls"][0]["function"]["arguments"]) == ("", {})


@pytest.mark.parametrize(("given", "read"), [('{"city": "Rome"}', {"city": "Rome"}), ({"a": 1}, {"a": 1}), ("[1]", "[1]")])
def test_arguments_of_a_tool_call_are_the_object_that_engines_give_to_the_template(given, read):
    call = {"name": "f", "arguments": given}
    for calls in ([{"id": "1", "function": call}], [call]):
        (found,) = parsed({"messages": [USER, {**CALL, "tool_calls": calls}, RESULT, USER]}).history[1]["tool_calls"]
        assert found.get("function", found)["arguments"] == read


@pytest.mark.parametrize(
    ("value", "turns"), [("Hi", ("Hi",)), (["Hi", "And?"], ("Hi", "And?")), ([USER], ("Hi",)), ([USER, ASSISTANT], ("Hi",))]
)
def test_a_column_holds_a_text_turns_or_a_chat_and_a_second_one_the_answer(value, turns):
    row = {"asked": value, "prompt_id": "p7", "said": "Hello"}
    prompt = parsed(row, "column", column="asked")
    assert (prompt.prompt_id, prompt.turns) == ("p7", turns)
    if value == "Hi":
        assert parsed(row, "column", column="asked", answer_column="said").answer == "Hello"
    with pytest.raises(InputError, match=r"'told' \(suite\.column\)"):
        parsed(row, "column", column="asked", answer_column="told")


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"body": {"input": "Hi"}}, "messages"),
        ({"turns": []}, "turns"),
        ({"turns": ["a", " "]}, "turn"),
        ({"turns": ["a"], "id": [1]}, "id"),
        ({"turns": ["a"], "category": 3}, "category"),
        ({"messages": [{"role": "user", "content": 3}]}, "message"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "messages"),
        ({"messages": [USER], "tools": "hammer"}, "tools"),
        ({"messages": [USER], "tools": [1]}, "tools"),
        ({"asked": "Hi"}, r"suite\.column"),
        ({"conversations": [{"from": "human"}]}, "message"),
        ({"conversations": "Hi"}, "conversations"),
        ({"prompt_ids": [-1]}, "prompt_ids"),
        ({"loss_mask": [1, 1]}, "ids"),
        ({"loss_mask": [0, 1], "input_ids": [1, 2, 3]}, "loss_mask"),
        ({"loss_mask": [0, 2], "input_ids": [1, 2]}, "loss_mask"),
        ({"loss_mask": [1, 0], "token_ids": [1, 2]}, "loss_mask"),
        ({"messages": [{**USER, "content": [{"type": "text", "text": None}]}]}, "text"),
        ({"messages": [{**USER, "content": [{"type": "image_url"}]}]}, "image"),
        ({"messages": [{**USER, "content": [{"type": "video"}]}]}, "video"),
    ],
)
def test_a_row_that_asks_nothing_is_refused_by_name(row, key):
    with pytest.raises(InputError, match=f"row 0: .*{key}"):
        parsed(row)

"""Ids and labels in the chat templates of public families are those that `apply_chat_template` gives, turn by turn."""

import copy
import re
from dataclasses import replace

import pytest

from distill.dataset.conversations import share_rows
from distill.generation.answers import UNREACHED, Dialogue, existing_answers
from distill.generation.bad_rows import LeftOut
from distill.generation.prompts import NOT_ENCODED, fit_prompts
from distill.generation.rendering import check_answer_end
from distill.generation.row_forms import read_row
from tests.support.chat_templates import CHATML, FAMILIES, Family

THOUGHT = {"thinking": "2 and 2."}  # as of gpt-oss; read as `reasoning_content`
SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two and two?"}
ANSWER, AGAIN = {"role": "assistant", "content": "Four."}, {"role": "user", "content": "Again?"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
OTHER = {"id": "2", "type": "function", "function": {"name": "halve", "arguments": {}}}
RESULT = {"role": "tool", "content": 'is "4"', "tool_call_id": "1"}


@pytest.fixture(scope="module")
def in_family(byte_target, tiny_llama):
    """A function that returns a target with the template and the special tokens of a family."""
    model = tiny_llama(vocab_size=400, max_position_embeddings=2048)

    def make(family):
        tokenizer = copy.deepcopy(byte_target.tokenizer)
        tokenizer.add_special_tokens({"additional_special_tokens": family.special.split()})
        given = "" if family.thinks is None else f"{{% set enable_thinking = {str(family.thinks).lower()} %}}"
        tokenizer.chat_template = given + family.template
        end = re.search(r"<[^<>]+>$", family.answer)
        ends = tokenizer.convert_tokens_to_ids([end[0] if end else "<|user|>"])
        return replace(byte_target, model=model, tokenizer=tokenizer, eos_token_ids=tuple(ends))

    return make


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def reference(target, messages, *, answer_follows=False):
    named = [each | ({"reasoning_content": each["thinking"]} if "thinking" in each else {}) for each in messages]
    return target.tokenizer.apply_chat_template(named, add_generation_prompt=answer_follows)["input_ids"]


def chat_of(family, *messages):
    system = [] if "System role not supported" in family.template else [SYSTEM]
    thought = THOUGHT if "2 and 2." in family.answer else {}
    return [*system, *(each | (thought if each is ANSWER else {}) for each in messages)]


def prompt_of(messages, **keys):
    return read_row({"messages": messages, **keys}, "messages", "line 1", setting="prompts.field")


def test_a_data_sets_answer_is_what_the_template_writes_after_the_prompt(in_family, family, caplog):
    target, chat, left_out = in_family(family), chat_of(family, ASKED, ANSWER, AGAIN, ANSWER), LeftOut()
    answered = existing_answers(target, None, left_out)
    turns = answered.rows_of(prompt_of(chat))
    answered.warn()
    assert (left_out.counts, caplog.text) == ({}, "")
    for row, end in zip(turns, (len(chat) - 2, len(chat)), strict=True):
        prompt_ids = reference(target, chat[: end - 1], answer_follows=True)
        whole = reference(target, chat[:end])
        assert list(row.prompt_ids) == prompt_ids
        assert target.tokenizer.decode(row.answer_ids) == family.answer
        assert row.ended == family.answer.endswith(">")
        if whole[: len(prompt_ids)] == prompt_ids:
            assert list(row.answer_ids) == whole[len(prompt_ids) :][: len(row.answer_ids)]
    rows, (first, last) = share_rows(turns), (target.tokenizer.decode(row.prompt_ids) for row in turns)
    assert [answer for row in rows for answer in row.answers] == [row.answer_ids for row in turns]
    assert len(rows) == (1 if last.startswith(first + family.answer) else 2)
    assert len(rows) == 2 or "2 and 2." not in family.answer  # no template keeps the thinking of an earlier answer


def test_the_targets_own_turns_follow_one_another_as_a_server_would_send_them(in_family, family):
    target, chat = in_family(family), chat_of(family, ASKED)
    dialogue = Dialogue(target, replace(prompt_of(chat), turns=(ASKED["content"], AGAIN["content"])), 100)
    assert list(dialogue.ask().prompt_ids) == reference(target, chat, answer_follows=True)
    ids = target.tokenizer(family.answer, add_special_tokens=False)["input_ids"]
    dialogue.take(ids)
    said = "Four." if "<|channel|>" in family.answer else target.tokenizer.decode(ids, skip_special_tokens=True)
    served = [*chat, {"role": "assistant", "content": said}, AGAIN]
    second = list(dialogue.ask().prompt_ids)
    assert second == reference(target, served, answer_follows=True)
    assert "2 and 2." not in target.tokenizer.decode(second)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("qwen3", "<think>\n2 and"),
        ("deepseek-r1", "2 and"),
        ("gpt-oss", "<|channel|>analysis<|message|>2 and"),
        ("qwen3", "<think>\n2 and 2.\n</think>\n\nFo"),
    ],
)
def test_no_turn_follows_an_answer_that_was_cut_off_inside_its_thinking(in_family, name, cut):
    target = in_family(FAMILIES[name])
    dialogue = Dialogue(target, replace(prompt_of([ASKED]), turns=("Two and two?", "Again?", "And now?")), 100)
    dialogue.ask()
    dialogue.take(target.tokenizer(cut, add_special_tokens=False)["input_ids"])
    thinks = "Fo" not in cut
    assert (dialogue.ask() is None, len(dialogue.rows), dialogue.dropped[UNREACHED]) == (thinks, 1, 2 * thinks)


@pytest.mark.parametrize(
    ("name", "messages", "keys", "left_out"),
    [
        ("smollm2", [ASKED, ANSWER | {"tool_calls": [CALL]}, RESULT], {"tools": [CALL]}, {"tool_calls", "tools"}),
        ("gpt-oss", [ASKED, ANSWER | {"tool_calls": [CALL, OTHER]}, RESULT], {}, {"tool_calls", "a message of role assistant"}),
        ("mistral", [ASKED | {"role": "system"}, AGAIN], {}, set()),
        ("qwen2.5", [ASKED, ANSWER | THOUGHT, AGAIN], {}, set()),
        ("llama-3.1", [ASKED, ANSWER | {"content": None, "tool_calls": [CALL]}, RESULT], {}, set()),
        ("llama-3.1", [ASKED, ANSWER | {"tool_calls": []}, AGAIN], {}, set()),
    ],
)
def test_what_a_template_leaves_out_is_counted_and_told_with_its_place(in_family, caplog, name, messages, keys, left_out):
    target = in_family(FAMILIES[name])
    fit_prompts(target, [prompt_of(messages, **keys)], LeftOut())
    assert {
        what for what in ("tool_calls", "tools", "a message of role assistant") if f"out {what} of" in caplog.text
    } == left_out
    assert ("line 1" in caplog.text) == bool(left_out)


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("gemma-2", [SYSTEM, ASKED]),
        ("gemma-3", [ASKED, AGAIN]),
        ("llama-3.1", [ASKED, ANSWER | {"tool_calls": [CALL, OTHER]}, RESULT]),
        ("gpt-oss", [ASKED, ANSWER | {"content": "<|channel|>final<|message|>Four."}, AGAIN]),
    ],
)
def test_a_conversation_that_a_template_refuses_is_refused_by_its_place_or_left_out_and_counted(in_family, name, messages):
    target, left_out = in_family(FAMILIES[name]), LeftOut(on_bad_row="skip")
    assert fit_prompts(target, [prompt_of(messages), prompt_of([ASKED])], left_out) == [prompt_of([ASKED])]
    assert left_out.counts == {NOT_ENCODED: 1}
    with pytest.raises(ValueError, match=r"line 1: .*on_bad_row"):
        fit_prompts(target, [prompt_of(messages)], LeftOut())


def test_an_answer_that_a_tokenizer_would_merge_with_its_prompt_is_learnt_as_the_target_would_write_it(in_family):
    target = in_family(FAMILIES["smollm2"])
    target.tokenizer.add_tokens(["\n\n\n"])  # in a whole chat, the line break of the prompt and two of the answer
    answered = existing_answers(target, None, LeftOut())
    (row,) = answered.rows_of(prompt_of([ASKED, ANSWER | {"content": "\n\ncode"}]))
    assert list(row.prompt_ids) == reference(target, [ASKED], answer_follows=True)
    assert target.tokenizer.decode(row.answer_ids) == "\n\ncode<|im_end|>"


def test_a_template_whose_answers_do_not_end_as_the_targets_do_is_told(in_family, caplog):
    check_answer_end(in_family(FAMILIES["qwen2.5"]))
    assert not caplog.text
    check_answer_end(in_family(Family("{% for m in messages %}{{ m.content }}\n{% endfor %}", CHATML, "<|im_end|>")))
    assert "eos_token_id" in caplog.text

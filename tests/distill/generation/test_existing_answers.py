"""Answers that a data set brings: the same tokens as if the target had written them, and a manifest that says who did."""

import json
from pathlib import Path

import pytest
from accelerate import PartialState

from configs.runtime.errors import InputError
from configs.schema.data import DataConfig
from distill.dataset.conversations import check_written_for, is_written_by_target, read_conversations
from distill.generation import make_dataset as making
from distill.generation.answers import EMPTY
from distill.generation.existing_answers import NOT_A_CONTINUATION, check_given, given_answers
from distill.generation.make_dataset import make_dataset
from distill.generation.prompts import Prompt


@pytest.fixture(autouse=True)
def fresh_process_state():
    """Leave no process state behind: accelerate keeps the first one for the life of the process."""
    yield
    PartialState._reset_state()


def prompt(answer, text="hi"):
    return Prompt(prompt_id="p", category="c", turns=(text,), answer=answer)


def one(target, answer, max_new_tokens=100, text="hi"):
    answered = given_answers(target, [prompt(answer, text)], max_new_tokens)
    return answered.conversations[0] if answered.conversations else answered.dropped


def test_an_answer_is_what_the_target_would_have_had_to_write(byte_target):
    row = one(byte_target, "Well.")
    [end] = byte_target.eos_token_ids
    assert row.prompt_ids == tuple(byte_target.encode_chat([{"role": "user", "content": "hi"}]))
    assert byte_target.tokenizer.decode(row.answer_ids[:-1]) == "Well."
    assert (row.answer_ids[-1], row.ended) == (end, True)  # the template's line break after it is left out
    assert [message["role"] for message in row.messages] == ["user", "assistant"]


def test_a_long_answer_is_cut_off_at_the_longest_length_and_at_the_context(byte_target):
    row = one(byte_target, "Well.", max_new_tokens=3)
    assert (byte_target.tokenizer.decode(row.answer_ids), row.ended) == ("Wel", False)
    row = one(byte_target, "x" * 200, max_new_tokens=500)
    assert len(row.prompt_ids) + len(row.answer_ids) == byte_target.max_positions
    assert not row.ended


def test_an_empty_answer_is_dropped_and_counted(byte_target):
    assert one(byte_target, "") == {EMPTY: 1}


def test_an_answer_whose_template_rewrites_the_prompt_is_dropped_and_counted(byte_target, monkeypatch):
    template = "{% if add_generation_prompt %}open{% else %}closed{% endif %}"
    monkeypatch.setattr(byte_target.tokenizer, "chat_template", template)
    assert one(byte_target, "Well.") == {NOT_A_CONTINUATION: 1}


def test_a_prompt_without_an_answer_is_refused_by_name():
    check_given([prompt("Well.")])
    with pytest.raises(
        InputError, match=r"1 of 2 prompts bring no answer, the first is p: expected chat messages that end with"
    ):
        check_given([prompt("Well."), prompt(None)])


@pytest.fixture
def config(tmp_path, byte_target_folder):
    rows = [
        {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"answer {n}"}]}
        for n in range(20)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig.model_validate(
        {
            "target": {"name": str(byte_target_folder), "dtype": "float32", "device": "cpu"},
            "prompts": {"source": "file", "path": str(tmp_path / "chats.jsonl")},
            "answers": {"written_by": "dataset"},
            "held_out_share": 0.3,
            "output": str(tmp_path / "data"),
        }
    )


def test_the_data_hold_the_answers_that_came_and_say_who_wrote_them(config, byte_target, monkeypatch):
    monkeypatch.setattr(making.AnswerJob, "work", lambda *_, **__: pytest.fail("the target wrote"))
    make_dataset(config)
    folder = Path(config.output)
    rows = [row for name in ("train", "held_out") for row in read_conversations(folder / f"{name}.jsonl")]
    assert sorted(row.messages[-1]["content"] for row in rows) == sorted(f"answer {n}" for n in range(20))
    assert all(row.messages[-1]["content"][7:] == row.messages[0]["content"][9:] for row in rows)
    assert json.loads((folder / "manifest.json").read_text())["answers_written_by"] == "dataset"
    assert not is_written_by_target(folder / "train.jsonl")
    assert check_written_for(folder / "train.jsonl", byte_target.identity) == []


def test_a_file_without_answers_is_refused_before_the_target_is_loaded(config, tmp_path, monkeypatch):
    monkeypatch.setattr(making, "load_target", lambda config: pytest.fail("loaded"))
    (tmp_path / "chats.jsonl").write_text('{"question_id": "q1", "turns": ["hi"]}\n')
    with pytest.raises(InputError, match="1 of 1 prompts bring no answer, the first is q1"):
        make_dataset(config)
    assert not Path(config.output).exists()

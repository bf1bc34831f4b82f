"""The conversations' file: token ids come back as they were written, and a wrong line is named."""

import json

import pytest

from configs.runtime.errors import InputError
from distill.dataset.conversations import (
    MANIFEST,
    Conversation,
    check_written_for,
    count_answer_tokens,
    is_written_by_target,
    read_conversations,
)
from heads.target.identity import TargetIdentity

ROW = Conversation(
    prompt_id="p-1",
    category="writing",
    turn=0,
    messages=({"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": 'naïve\x85 "quoted"\n'}),
    prompt_ids=(1, 2, 3),
    answer_ids=(4, 5),
    ended=True,
)
IDENTITY = TargetIdentity(name="t", revision=None, weights_sha256="w", tokenizer_sha256="k", chat_template_sha256="c")


def test_a_row_comes_back_as_it_was_even_with_unicode_line_breaks_in_the_text(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(ROW.to_line() * 2, encoding="utf-8")
    assert read_conversations(path) == [ROW, ROW]
    assert count_answer_tokens([ROW, ROW]) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("answer_ids", []),
        ("answer_ids", [1.5]),
        ("prompt_ids", [True]),
        ("prompt_ids", [-1]),
        ("turn", "0"),
        ("messages", [{"role": "user"}]),
        ("ended", 1),
    ],
)
def test_a_wrong_value_is_refused_with_its_line_and_field(tmp_path, field, value):
    path = tmp_path / "train.jsonl"
    path.write_text(ROW.to_line() + json.dumps(json.loads(ROW.to_line()) | {field: value}) + "\n")
    with pytest.raises(InputError, match=f"line 2: '{field}' must be"):
        read_conversations(path)


def test_a_missing_field_is_refused_with_its_line(tmp_path):
    values = json.loads(ROW.to_line())
    del values["answer_ids"]
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(values) + "\n")
    with pytest.raises(InputError, match="line 1: the conversation has no 'answer_ids'"):
        read_conversations(path)


def write_manifest(folder, **changes):
    content = {"format_version": 1, "target": IDENTITY.to_dict() | changes}
    (folder / MANIFEST).write_text(json.dumps(content))
    return folder / "train.jsonl"


def test_data_of_the_same_target_is_accepted(tmp_path):
    assert check_written_for(write_manifest(tmp_path), IDENTITY) == []


def test_data_of_other_weights_is_usable_and_named(tmp_path):
    assert check_written_for(write_manifest(tmp_path, weights_sha256="other"), IDENTITY) == ["target weights"]


def test_data_of_another_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="tokenizer is not that of"):
        check_written_for(write_manifest(tmp_path, tokenizer_sha256="other"), IDENTITY)


def test_answers_are_the_targets_unless_the_manifest_says_otherwise(tmp_path):
    path = write_manifest(tmp_path)
    assert is_written_by_target(path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | {"answers_written_by": "dataset"}))
    assert not is_written_by_target(path)


def test_data_without_its_manifest_is_refused(tmp_path):
    with pytest.raises(InputError, match="data manifest not found"):
        check_written_for(tmp_path / "train.jsonl", IDENTITY)

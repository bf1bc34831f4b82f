"""A file of conversations: rows come back as written, and a wrong line is named."""

import dataclasses
import json
import tracemalloc

import numpy as np
import pytest

from configs.runtime.errors import InputError
from distill.dataset.batches import BucketedBatchSampler, ConversationDataset, PackedBatchSampler
from distill.dataset.conversations import (
    MANIFEST,
    Conversation,
    check_held_out,
    check_written_for,
    index_of,
    open_conversations,
    read_conversations,
    share_rows,
    text_hash,
)
from heads.frozen.identity import TargetIdentity

IDENTITY = TargetIdentity(name="t", revision=None, weights_sha256="w", tokenizer_sha256="k", chat_template_sha256="c")


def conversation(number, prompt=4, answer=9):
    """Return a row whose text has Unicode line breaks, which end no line."""
    return Conversation(
        prompt_id=f"p{number}",
        category="c",
        turn=number % 2,
        messages=({"role": "user", "content": 'a\u2028b, \u00e9 \x85 "quoted"\n'},),
        prompt_ids=tuple(range(prompt + number % 3)),
        answer_ids=tuple(range(1, 1 + answer + number % 5)),
        ended=True,
    )


def chat(*turns, answer="Well.", prompt=(1, 2)):
    """Return the rows of a chat whose prompts go on from the answers before, a row a turn."""
    rows, messages, ids = [], (), prompt
    for turn, said in enumerate(turns):
        asked = (*messages, {"role": "user", "content": said})
        messages = (*asked, {"role": "assistant", "content": answer})
        settings = {"prompt_ids": ids, "answer_ids": (30 + turn, 5), "ended": True, "messages": messages}
        rows.append(Conversation(prompt_id="chat", category="c", turn=turn, **settings))
        ids = (*ids, 30 + turn, 5, 6, 7)
    return rows


ROWS = [*(conversation(number) for number in range(19)), *share_rows(chat("one", "two", "three"))]


@pytest.fixture
def path(tmp_path):
    """Twenty conversations, with an empty line among them and none after the last."""
    lines = [row.to_line() for row in ROWS]
    lines.insert(7, "\n")
    path = tmp_path / "train.jsonl"
    path.write_text("".join(lines).rstrip("\n"))
    return path


def test_rows_come_back_as_they_were(path):
    rows = open_conversations(path)
    assert read_conversations(path) == list(rows) == ROWS
    assert (rows[3:6], rows[-1], len(rows)) == (ROWS[3:6], ROWS[-1], 20)
    for ours, theirs in zip(index_of(rows)[1:], index_of(ROWS)[1:], strict=True):
        assert ours.tolist() == theirs.tolist()
    assert list(ConversationDataset(rows, 13)) == list(ConversationDataset(ROWS, 13))


def test_turns_whose_prompts_go_on_share_a_row_and_others_keep_their_own():
    turns = chat("one", "two", "three")
    (row,) = share_rows(turns)
    assert row.answers == [turn.answer_ids for turn in turns]
    assert (row.messages, row.earlier, row.user_texts) == (
        turns[2].messages,
        ((2, 4), (6, 8)),
        ["one", "one\ntwo", "one\ntwo\nthree"],
    )
    index = index_of([conversation(0), row])
    assert index.asking([text_hash("ONE  two")]).tolist() == [False, True]
    assert index.answer_counts[[5, 30, 32]].tolist() == [4, 1, 1]
    rewritten = dataclasses.replace(turns[1], prompt_ids=(1, 2, 30, 9, 6, 7))  # the template left something of an answer out
    assert share_rows([turns[0], rewritten]) == [turns[0], rewritten]
    assert share_rows([turns[0], turns[2]]) == [turns[0], turns[2]]  # the turn between has no row
    assert [len(each.earlier) for each in share_rows([turns[0], rewritten, turns[2]])] == [0, 0, 0]


def with_field(**field):
    return conversation(1).to_line() + json.dumps(json.loads(conversation(1).to_line()) | field)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("\n \n", "is empty"),
        (conversation(1).to_line() + "{", "line 2"),
        (conversation(1).to_line() + "\n[1]", "line 3"),
        (json.dumps({"prompt_id": "p"}), "line 1: category"),
        (b"\xff\xfe".decode("latin-1"), "line 1"),
        (with_field(answer_ids=[]), "line 2: answer_ids"),
        (with_field(prompt_ids=[True]), "line 2: prompt_ids"),
        (with_field(turn="0"), "line 2: turn"),
        (with_field(messages=[{"role": "user"}]), "line 2: messages"),
        (with_field(ended=1), "line 2: ended"),
        (with_field(earlier=[[0, 2]]), "line 2: .*earlier"),
        (with_field(earlier=[[1, 9]]), "line 2: .*earlier"),
        (with_field(earlier=[[1, 2]]), "line 2: .*earlier"),
    ],
)
def test_a_bad_line_is_named(path, content, complaint):
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=complaint):
        open_conversations(path)
    path.unlink()
    with pytest.raises(InputError, match="conversations file not found"):
        open_conversations(path)


def test_a_file_that_changes_while_it_is_read_is_noticed(path):
    rows = open_conversations(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    with pytest.raises(InputError, match="start again"):
        rows[1]
    path.write_text("".join([conversation(2, answer=8).to_line(), *lines[1:]]))
    with pytest.raises(InputError, match="another conversation than when the file was opened"):
        rows[0]


@pytest.mark.parametrize("packed", [False, True], ids=["bucketed", "packed"])
def test_a_conversation_takes_less_than_a_hundred_bytes_of_memory(tmp_path, packed):
    """Of what Python and NumPy ask for, after opening to the batches of an epoch; the sampler's tensors are added."""
    count, path = 5_000, tmp_path / "train.jsonl"
    line = conversation(0, prompt=40, answer=60).to_line()
    path.write_text(line * count)
    tracemalloc.start()
    try:
        dataset = ConversationDataset(open_conversations(path), 512)
        if packed:
            sampler = PackedBatchSampler(dataset.lengths, 8, pack_length=1024, seed=0)
        else:
            sampler = BucketedBatchSampler(dataset.lengths, 8, seed=0)
        seen = sum(len(np.ravel(row)) for batch in sampler for row in batch)
        assert dataset[count // 2].input_ids[:2] == (0, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == count
    tensors = 2 * 8 * count  # the order of an epoch, and the order of its shuffled parts
    assert peak + tensors < 100 * count + 100_000
    assert peak < len(line) * count / 4  # far from holding the file


# --- the manifest -------------------------------------------------------------------------------------------------


def write_manifest(folder, **changes):
    (folder / MANIFEST).write_text(json.dumps({"format_version": 1, "target": IDENTITY.to_dict() | changes}))
    return folder / "train.jsonl"


def test_data_of_other_weights_are_usable_and_named_and_those_of_another_tokenizer_are_refused(tmp_path):
    with pytest.raises(InputError, match="data manifest not found"):
        check_written_for(tmp_path / "train.jsonl", IDENTITY)
    assert check_written_for(write_manifest(tmp_path), IDENTITY) == []
    assert check_written_for(write_manifest(tmp_path, weights_sha256="other"), IDENTITY) == ["target weights"]
    with pytest.raises(InputError, match="tokenizer is not that of"):
        check_written_for(write_manifest(tmp_path, tokenizer_sha256="other"), IDENTITY)


def test_held_out_conversations_that_are_trained_on_are_refused(path):
    rows = open_conversations(path)
    other = [dataclasses.replace(rows[0], prompt_id="q", messages=({"role": "user", "content": "else?"},))]
    check_held_out(rows, other)
    with pytest.raises(InputError, match=r"data\.held_out: 1 of its 2 conversations ask what data\.train asks, prompt p0"):
        check_held_out(rows, [*other, rows[0]])

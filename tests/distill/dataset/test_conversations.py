"""A file of conversations: rows come back as written, by an index that is never another file's, and a wrong line is named."""

import dataclasses
import json
import stat
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from configs.runtime.errors import InputError
from configs.runtime.files import sha256_of
from distill.dataset import conversations
from distill.dataset.batches import BucketedBatchSampler, ConversationDataset, PackedBatchSampler
from distill.dataset.conversations import (
    INDEX_SUFFIX,
    MANIFEST,
    Conversation,
    ConversationFile,
    check_held_out,
    check_written_for,
    index_of,
    open_conversations,
    read_conversations,
)
from distill.generation.make_dataset import check_output
from heads.frozen import identity
from heads.frozen.identity import TargetIdentity
from train.resolve import most_frequent_answer_tokens

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


ROWS = [conversation(number) for number in range(20)]


@pytest.fixture
def path(tmp_path):
    """Twenty conversations, with an empty line among them and none after the last."""
    lines = [row.to_line() for row in ROWS]
    lines.insert(7, "\n")
    path = tmp_path / "train.jsonl"
    path.write_text("".join(lines).rstrip("\n"))
    return path


def index_file(path):
    return path.with_name(path.name + INDEX_SUFFIX)


def test_rows_come_back_as_they_were_and_the_index_is_kept(path, monkeypatch):
    for _ in range(2):
        rows = open_conversations(path)
        assert read_conversations(path) == list(rows) == ROWS
        assert (rows[3:6], rows[-1], len(rows)) == (ROWS[3:6], ROWS[-1], 20)
        with pytest.raises(IndexError):
            rows[20]
        for ours, theirs in zip(index_of(rows)[1:], index_of(ROWS)[1:], strict=True):
            assert ours.tolist() == theirs.tolist()
        assert list(ConversationDataset(rows, 13)) == list(ConversationDataset(ROWS, 13))
        monkeypatch.setattr("distill.dataset.conversations._make_index", lambda *_: pytest.fail("the index was made again"))
    check_output(path.parent)  # data may be made again beside an index
    assert stat.S_IMODE(index_file(path).stat().st_mode) & 0o044 == stat.S_IMODE(path.stat().st_mode) & 0o044


@pytest.mark.parametrize(
    "spoil", [lambda content: content[:-9], lambda content: content.replace(b" of data ", b" of DATA ", 1)]
)
def test_an_index_that_is_damaged_or_of_another_file_is_made_again(path, spoil):
    open_conversations(path)
    whole = index_file(path).read_bytes()
    index_file(path).write_bytes(spoil(whole))
    assert list(open_conversations(path)) == ROWS
    assert index_file(path).read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_read_all_the_same(path, monkeypatch, caplog):
    def refuse(path, content):
        raise InputError(f"cannot write {path}: Read-only file system")

    monkeypatch.setattr("distill.dataset.conversations.write_bytes", refuse)
    with caplog.at_level("INFO", logger="draftsmith"):
        assert list(open_conversations(path)) == ROWS
    assert "every run will make the index of its conversations again" in caplog.text
    assert not index_file(path).exists()


def with_field(**field):
    return conversation(1).to_line() + json.dumps(json.loads(conversation(1).to_line()) | field)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        (conversation(1).to_line() + "{", "line 2: not JSON"),
        (conversation(1).to_line() + "\n[1]", "line 3: expected an object, got list"),
        (json.dumps({"prompt_id": "p"}), "line 1: the conversation has no 'category'"),
        (b"\xff\xfe".decode("latin-1"), "line 1: not JSON"),
        (with_field(answer_ids=[]), "line 2: 'answer_ids' must be a list of token ids, at least one"),
        (with_field(prompt_ids=[True]), "line 2: 'prompt_ids' must be"),
        (with_field(turn="0"), "line 2: 'turn' must be a whole number from 0, got '0'"),
        (with_field(messages=[{"role": "user"}]), "line 2: 'messages' must be"),
        (with_field(ended=1), "line 2: 'ended' must be true or false"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_kept(path, content, complaint):
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=complaint):
        open_conversations(path)
    assert not index_file(path).exists()
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
    path.unlink()
    with pytest.raises(InputError, match="cannot read conversations file"):
        rows[0]


def test_a_file_is_read_whole_once_for_all_processes_starts_and_the_counted_vocabulary(
    path, tiny_llama, as_target, monkeypatch, tmp_path
):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "REMEMBERED_BYTES", 0)
    hashed, indexed, plain = [], [], conversations._make_index
    monkeypatch.setattr(identity, "sha256_of", lambda path: hashed.append(path) or sha256_of(path))
    monkeypatch.setattr(conversations, "_make_index", lambda *of: indexed.append(of) or time.sleep(0.2) or plain(*of))
    with ThreadPoolExecutor(4) as processes:
        opened = list(processes.map(open_conversations, [path] * 4))
    assert [list(rows) for rows in opened] == [ROWS] * 4
    assert (len(hashed), len(indexed)) == (1, 1)
    target, rows = as_target(tiny_llama(), eos=(50,)), open_conversations(path)
    expected = most_frequent_answer_tokens(ROWS, 11, target)
    monkeypatch.setattr(ConversationFile, "__getitem__", None)
    found = most_frequent_answer_tokens(rows, 11, target)
    assert (len(hashed), len(indexed)) == (1, 1)
    assert torch.equal(found.token_ids_W, expected.token_ids_W)
    assert found.token_ids_W.tolist() == [*range(1, 11), 50]


@pytest.mark.parametrize("packed", [False, True], ids=["bucketed", "packed"])
def test_a_conversation_takes_less_than_a_hundred_bytes_of_memory(tmp_path, packed):
    """Of what Python and NumPy ask for, from the index to the batches of an epoch; the sampler's tensors are added."""
    count, path = 20_000, tmp_path / "train.jsonl"
    line = conversation(0, prompt=40, answer=60).to_line()
    path.write_text(line * count)
    open_conversations(path)
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
    assert peak + tensors < 100 * count
    assert peak < len(line) * count / 8  # far from holding the file


# --- the manifest -------------------------------------------------------------------------------------------------


def write_manifest(folder, written_by=None, **changes):
    content = {"format_version": 1, "target": IDENTITY.to_dict() | changes} | (
        {"answers_written_by": written_by} if written_by else {}
    )
    (folder / MANIFEST).write_text(json.dumps(content))
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

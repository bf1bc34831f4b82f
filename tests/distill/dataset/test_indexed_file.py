"""A file of conversations read by its index: the same rows, little memory, and an index that is never of another file."""

import json
import stat
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from configs.runtime.errors import InputError
from distill.dataset.batches import BucketedBatchSampler, ConversationDataset
from distill.dataset.conversations import INDEX_SUFFIX, Conversation, open_conversations, read_conversations, row_lengths
from distill.dataset.packing import PackedBatchSampler
from distill.generation.make_dataset import check_output
from distill.student.vocabulary import most_frequent_answer_tokens


def conversation(number, prompt=4, answer=9):
    return Conversation(
        prompt_id=f"p{number}",
        category="c",
        turn=number % 2,
        messages=({"role": "user", "content": "a line\u2028of text, \u00e9"},),
        prompt_ids=tuple(range(prompt + number % 3)),
        answer_ids=tuple(range(1, 1 + answer + number % 5)),
        ended=True,
    )


@pytest.fixture
def path(tmp_path):
    """Twenty conversations, with an empty line among them and none after the last."""
    lines = [conversation(number).to_line() for number in range(20)]
    lines.insert(7, "\n")
    path = tmp_path / "train.jsonl"
    path.write_text("".join(lines).rstrip("\n"))
    return path


def index_of(path):
    return path.with_name(path.name + INDEX_SUFFIX)


@pytest.mark.parametrize("times", [1, 2])
def test_rows_are_those_of_the_whole_file(path, times):
    for _ in range(times):  # the second time by the index that was kept
        rows = open_conversations(path)
    expected = read_conversations(path)
    assert list(rows) == expected
    assert rows[3:6] == expected[3:6]
    assert rows[-1] == expected[-1]
    assert len(rows) == 20
    with pytest.raises(IndexError):
        rows[20]
    for ours, theirs in zip(row_lengths(rows), row_lengths(expected), strict=True):
        assert ours.tolist() == theirs.tolist()


def test_examples_are_those_of_rows_in_memory(path):
    found, expected = (ConversationDataset(rows, 13) for rows in (open_conversations(path), read_conversations(path)))
    assert list(found) == list(expected)
    assert (found.num_labels, found.num_dropped) == (expected.num_labels, expected.num_dropped)


def test_the_index_is_kept_and_not_made_again(path, monkeypatch):
    open_conversations(path)
    monkeypatch.setattr("distill.dataset.conversations._make_index", lambda path: pytest.fail("the index was made again"))
    assert open_conversations(path)[0] == conversation(0)


def spoil_bytes(index):
    index.write_bytes(index.read_bytes()[:-9])


def spoil_header(index):
    index.write_bytes(index.read_bytes().replace(b" of data ", b" of DATA ", 1))


def spoil_column(**other):
    """Return what puts another column into an index that is otherwise the file's own."""

    def spoil(index):
        with safe_open(index, framework="pt") as file:
            columns, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        save_file({name: other.get(name, lambda column: column)(column) for name, column in columns.items()}, index, metadata)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_bytes,
        spoil_header,
        lambda index: index.write_bytes(b""),
        spoil_column(offsets=lambda column: column.bfloat16()),
        spoil_column(answer_lengths=lambda column: column[:-1].clone()),
        spoil_column(prompt_lengths=lambda column: column.view(2, -1)),
    ],
)
def test_an_index_that_is_damaged_or_of_another_file_is_made_again(path, spoil):
    open_conversations(path)
    whole = index_of(path).read_bytes()
    spoil(index_of(path))
    assert list(open_conversations(path)) == read_conversations(path)
    assert index_of(path).read_bytes() == whole


def test_a_changed_file_gets_a_new_index(path):
    open_conversations(path)
    path.write_text(conversation(5).to_line() + path.read_text())
    assert list(open_conversations(path)) == read_conversations(path)
    assert len(open_conversations(path)) == 21


def test_a_folder_that_cannot_be_written_is_read_all_the_same(path, monkeypatch, caplog):
    def refuse(path, content):
        raise InputError(f"cannot write {path}: Read-only file system")

    monkeypatch.setattr("distill.dataset.conversations.write_bytes", refuse)
    with caplog.at_level("INFO", logger="draftsmith"):
        assert list(open_conversations(path)) == read_conversations(path)
    assert "every run will make the index of its conversations anew" in caplog.text
    assert not index_of(path).exists()


def test_data_may_be_made_again_where_training_has_left_an_index(path):
    open_conversations(path)
    check_output(path.parent)


def test_the_index_is_readable_for_those_who_may_read_the_data(path):
    open_conversations(path)
    assert stat.S_IMODE(index_of(path).stat().st_mode) & 0o044 == stat.S_IMODE(path.stat().st_mode) & 0o044


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        (conversation(1).to_line() + "{", "line 2: not JSON"),
        (conversation(1).to_line() + "\n[1]", "line 3: expected an object, got list"),
        (json.dumps({"prompt_id": "p"}), "line 1: the conversation has no 'category'"),
        (conversation(1).to_line().replace('"prompt_ids": [0', '"prompt_ids": [-1'), "line 1: 'prompt_ids' must be"),
        (b"\xff\xfe".decode("latin-1"), "line 1: not JSON"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_kept(path, content, complaint):
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=complaint):
        open_conversations(path)
    assert not index_of(path).exists()


def test_a_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(InputError, match="conversations file not found"):
        open_conversations(tmp_path / "nosuch.jsonl")


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


def test_a_draft_vocabulary_is_chosen_from_rows_that_are_not_in_memory(path, tiny_llama, as_target, monkeypatch):
    monkeypatch.setattr("distill.student.vocabulary.ROWS_AT_ONCE", 6)
    target = as_target(tiny_llama(), eos=(50,))
    found, expected = (
        most_frequent_answer_tokens(rows, 11, target) for rows in (open_conversations(path), read_conversations(path))
    )
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
    assert peak < len(line) * count / 10  # far from holding the file

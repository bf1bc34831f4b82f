"""Making a cache: what is cut off goes on to the same bytes, several processes share the work, and a full disk is told."""

import logging
import shutil
import threading
from collections import namedtuple

import pytest
import torch

from configs.runtime.errors import InputError
from distill.cache import writer as cache_making
from distill.cache.reader import RowLayout
from distill.cache.writer import check_folder, encode
from tests.support.caches import cache_job, random_conversations, run, shard_files, write_rows


def random_rows(seed):
    """Return twelve conversations of random tokens of the byte target, prompts of 3 to 8 of them, answers of 1 to 40."""
    return random_conversations([(3 + n % 6, 1 + (n * 17) % 40) for n in range(12)], 258, seed=seed)


@pytest.fixture(scope="module")
def conversations():
    return random_rows(seed=5)


@pytest.fixture
def job(tmp_path, conversations, byte_target):
    """A function that gives the job of making a cache of those conversations, or of others."""

    def make(output="cache", rows=conversations, **settings):
        values = {"batch_size": 3, "dtype": "float32", "shard_megabytes": 0.008} | settings
        return cache_job(byte_target, write_rows(tmp_path / "train.jsonl", rows), rows, tmp_path / output, **values)

    return make


def test_a_shard_that_was_deleted_or_damaged_is_made_again_to_the_same_bytes(job, tmp_path):
    run(job("whole"))
    run(job("parts"))
    (tmp_path / "parts" / "shard-00001.safetensors").unlink()  # as the complaint of a damaged one asks for
    (tmp_path / "parts" / "shard-00002.safetensors").write_bytes(b"{")
    run(job("parts"))
    assert len(list((tmp_path / "whole").glob("shard-*"))) >= 4
    assert shard_files(tmp_path / "parts") == shard_files(tmp_path / "whole")


def test_the_next_shard_is_computed_while_one_is_written_and_a_write_that_fails_ends_the_run(job, monkeypatch):
    second, computed, plain = threading.Event(), [], cache_making.read_examples

    def read_examples(*args):
        computed.append(args)
        if len(computed) == 2:
            second.set()
        return plain(*args)

    def write(path, content):
        assert second.wait(30)  # the second shard, while the first is written
        raise InputError("the disk is full")

    own = job()
    own.prepare()
    monkeypatch.setattr(cache_making, "read_examples", read_examples)
    monkeypatch.setattr(cache_making, "write_bytes", write)
    with pytest.raises(InputError, match="the disk is full"):
        own.work(rank=0, num_processes=1)
    assert own.finished() == set()


@pytest.mark.parametrize(
    ("wanted", "other"),
    [({}, {"max_length": 30}), ({"taps": [0, 2]}, {"taps": [1, 2]}), ({}, {"rows": random_rows(seed=6)})],
    ids=["length", "taps", "data"],
)
def test_shards_of_another_job_are_not_taken_for_ones_own(job, tmp_path, wanted, other):
    run(job(**wanted | other))
    run(job(**wanted))
    run(job("fresh", **wanted))
    assert shard_files(tmp_path / "cache") == shard_files(tmp_path / "fresh")


def test_two_processes_write_what_one_writes_each_its_own_shards(job, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run(job("one"))
    shared = job("two")
    shared.prepare()
    assert any(message.startswith("target cache: 136 bytes a token, ") for message in caplog.messages)
    shared.work(rank=1, num_processes=2)
    with pytest.raises(RuntimeError, match="the first is 0"):
        shared.finish()
    assert shared.finished() == set(range(1, len(list((tmp_path / "one").glob("shard-*"))), 2))
    shared.work(rank=0, num_processes=2)
    shared.finish()
    assert shard_files(tmp_path / "two") == shard_files(tmp_path / "one")


def test_a_disk_without_room_is_refused_before_anything_is_written(job, conversations, tmp_path, monkeypatch):
    usage = namedtuple("usage", ["free"])
    made = job()
    needed = sum(len(row.prompt_ids) + len(row.answer_ids) for row in conversations) * made.layout.bytes_per_row
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed - 1))
    with pytest.raises(InputError, match="output"):
        made.prepare()
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed))
    run(made)
    contents = [path.read_bytes() for path in (tmp_path / "cache").glob("shard-*")]
    assert sum(len(content) - 8 - int.from_bytes(content[:8], "little") for content in contents) == needed  # headers apart


def test_hidden_states_too_large_for_their_type_are_refused(byte_target):
    layout = RowLayout(dtype="float16", width=32, taps=[], target_dtype="float32")
    with pytest.raises(InputError, match="dtype"):
        encode(byte_target, layout, [torch.full((1, 32), 1e5)])


def test_what_a_killed_run_leaves_behind_is_no_obstacle_and_anything_else_is(job, tmp_path):
    run(job())
    for name in (".manifest.json.0badf00d", ".run.json.0badf00d", ".shard-00000.json.0badf00d"):
        (tmp_path / "cache" / name).write_text("{")
    check_folder(tmp_path / "cache")
    run(job())
    assert [path.name for path in (tmp_path / "cache").glob(".*")] == []
    (tmp_path / "cache" / "thesis.tex").touch()
    with pytest.raises(InputError, match="thesis"):
        check_folder(tmp_path / "cache")

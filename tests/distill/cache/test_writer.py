"""Making a cache: what is cut off goes on to the same bytes, several processes share the work, and a full disk is told."""

import logging
import shutil
import threading
from collections import Counter, namedtuple

import pytest
import torch

from configs.runtime.errors import InputError
from distill.cache.format import SHARD, RowLayout, check_folder
from distill.cache.reader import open_cache
from distill.cache.rows import encode
from distill.cache.storage import Folder
from distill.cache.writer import CacheJob
from tests.support.caches import (
    batch_of,
    cache_job,
    interrupt_after,
    random_conversations,
    run,
    shard_files,
    write_rows,
)


@pytest.mark.parametrize("settings", [{}, {"taps": [0, 2]}], ids=["rows before labels", "taps"])
def test_a_cut_off_run_goes_on_to_the_same_bytes(job, tmp_path, monkeypatch, settings):
    whole = run(job("whole", shard_megabytes=0.003, **settings))
    assert whole.num_shards >= 4
    written = interrupt_after(monkeypatch, 2)
    parts = job("parts", shard_megabytes=0.003, **settings)
    with pytest.raises(KeyboardInterrupt):
        run(parts)
    assert not (tmp_path / "parts" / "manifest.json").exists()
    (tmp_path / "parts" / ".shard-00002.safetensors.0badf00d").write_bytes(b"half of one")
    run(parts)
    assert written == [f"shard-{number:05d}.safetensors" for number in range(whole.num_shards)]
    assert shard_files(tmp_path / "parts") == shard_files(tmp_path / "whole")
    (tmp_path / "parts" / "shard-00001.safetensors").unlink()  # as the complaint of a damaged one asks for
    run(parts)
    assert shard_files(tmp_path / "parts") == shard_files(tmp_path / "whole")


def test_a_shard_costs_the_same_calls_however_many_there_are(byte_target, tmp_path, monkeypatch):
    def calls(count):
        rows = random_conversations([(2, 2)] * count, 258, seed=5)
        job = cache_job(
            byte_target, write_rows(tmp_path / f"{count}.jsonl", rows), rows, tmp_path / str(count), shard_megabytes=1e-6
        )
        job.prepare()
        assert len(job._plan) == count
        found = Counter()
        with monkeypatch.context() as patch:
            for name in ("names", "has", "read", "write", "create", "delete"):
                plain = getattr(Folder, name)
                patch.setattr(Folder, name, lambda *args, name=name, plain=plain: found.update([name]) or plain(*args))
            job.work(rank=0, num_processes=1)
        return found

    few, many = calls(20), calls(60)
    assert many["names"] == few["names"] < 6
    assert {name: many[name] - few[name] for name in ("has", "write", "create", "delete")} == dict.fromkeys(
        ("has", "write", "create", "delete"), 40
    )


def test_the_next_shard_is_computed_while_one_is_written_and_a_write_that_fails_ends_the_run(job, monkeypatch, tmp_path):
    made, computed, write_shard, compute = [], [], CacheJob._write_shard, CacheJob._shard_tensors
    second = threading.Event()

    def tensors(self, number):
        computed.append(len(made))
        if len(computed) == 2:
            second.set()
        return compute(self, number)

    def write(self, claims, number, *shard):
        if not made:
            assert second.wait(30)  # which comes while this one is under way
        if len(made) == 2:
            raise InputError("the disk is full")
        write_shard(self, claims, number, *shard)
        made.append(number)

    monkeypatch.setattr(CacheJob, "_shard_tensors", tensors)
    monkeypatch.setattr(CacheJob, "_write_shard", write)
    own = job("overlap", shard_megabytes=0.003)
    own.prepare()
    with pytest.raises(InputError, match="the disk is full"):
        own.work(rank=0, num_processes=1)
    assert computed[:2] == [0, 0]
    assert own.finished() == set(made) == {0, 1}
    monkeypatch.undo()
    run(own)
    run(job("alone", shard_megabytes=0.003))
    assert shard_files(tmp_path / "overlap") == shard_files(tmp_path / "alone")


@pytest.mark.parametrize(
    ("wanted", "other"),
    [
        ({"kind": "top_k", "k": 3}, {"kind": "last_hidden"}),
        ({"kind": "top_k", "k": 3}, {"max_length": 30}),
        ({"taps": [0, 2]}, {"taps": [1, 2]}),
    ],
)
def test_shards_of_another_job_are_not_taken_for_ones_own(job, tmp_path, wanted, other):
    run(job(**wanted | other))
    run(job(**wanted))
    run(job("fresh", **wanted))
    assert shard_files(tmp_path / "cache") == shard_files(tmp_path / "fresh")


def test_two_processes_write_what_one_writes_and_show_what_both_have_done(job, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run(job("one", shard_megabytes=0.003))
    shared = job("two", shard_megabytes=0.003)
    shared.prepare()
    assert caplog.messages[-1].startswith("target cache: 64 bytes a token, ")
    with pytest.raises(RuntimeError, match="the first is 0"):
        shared.finish()
    workers = [threading.Thread(target=shared.work, kwargs={"rank": rank, "num_processes": 2}) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    shared.finish()
    assert f"target cache: {sum(shared._lengths)} tokens" in [message.partition(" in ")[0] for message in caplog.messages]
    assert shard_files(tmp_path / "two") == shard_files(tmp_path / "one")


def test_a_shard_of_a_cache_that_was_made_of_other_settings_is_not_read(job, data_file, byte_target, conversations, tmp_path):
    run(job("one", chunk_size=2))
    run(job("other", chunk_size=3))
    name = SHARD.format(number=0)
    (tmp_path / "one" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(InputError, match=r"shard-00000\.safetensors is damaged, .* it is of another cache; delete it"):
        open_cache(tmp_path / "one", data_file, byte_target).signal(batch_of(conversations, [0]))


def test_a_disk_without_room_is_refused_before_anything_is_written(job, tmp_path, monkeypatch):
    usage = namedtuple("usage", ["free"])
    made = job(dtype="float32")
    needed = sum(len(row.answer_ids) for row in made.conversations) * 32 * 4
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed - 1))
    with pytest.raises(InputError, match=r"needs 0\.0 MB more, and its disk has 0\.0 MB free; .*fewer taps"):
        made.prepare()
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed))
    made.prepare()


def test_hidden_states_too_large_for_their_type_are_refused(byte_target):
    layout = RowLayout(kind="last_hidden", dtype="float16", width=32, vocab_size=byte_target.vocab_size)
    with pytest.raises(InputError, match="hidden is not finite in float16; try bfloat16"):
        encode(byte_target, layout, torch.full((1, 32), 1e5), 1)


def test_what_a_killed_run_leaves_behind_is_no_obstacle_and_anything_else_is(job, tmp_path):
    run(job())
    for name in (".manifest.json.0badf00d", ".run.json.0badf00d", ".shard-00000.json.0badf00d"):
        (tmp_path / "cache" / name).write_text("{")
    check_folder(Folder(tmp_path / "cache"))
    run(job())
    assert [path.name for path in (tmp_path / "cache").glob(".*")] == []
    (tmp_path / "cache" / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"holds thesis\.tex, which is no part of a target cache"):
        check_folder(Folder(tmp_path / "cache"))

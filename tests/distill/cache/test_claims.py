"""Shards are shared out by claims: a dead process's is taken over, a living one's is not, and other settings are refused."""

import json
import platform
import subprocess
import sys
import time

import psutil
import pytest

from configs.runtime.errors import InputError
from distill.cache import claims
from distill.cache.claims import Claims
from distill.cache.storage import Folder
from tests.support.caches import cache_job, random_conversations, run, shard_files, write_rows

HERE, ELSEWHERE = platform.node(), "another-node"


@pytest.fixture
def ended():
    """The number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "cache")


@pytest.fixture
def claimed(folder, monkeypatch):
    """A function that takes all shards of three; one that waits fails the test."""
    monkeypatch.setattr(claims.time, "sleep", lambda seconds: (_ for _ in ()).throw(TimeoutError))

    def take(start=0):
        found = Claims(folder=folder, num_shards=3, claim_seconds=60, start=start)
        for number in found.shards():
            assert folder.has(f"claim-{number:05d}")
            yield number
            folder.write(f"shard-{number:05d}.safetensors", b"")
            found.release(number)

    return take


def claim(host, process, age):
    return json.dumps({"host": host, "process": process, "time": time.time() - age}).encode()


@pytest.mark.parametrize(("start", "order"), [(0, [0, 1, 2]), (2, [2, 0, 1])])
def test_each_shard_is_claimed_once_from_the_start_on_and_no_claim_is_left(claimed, folder, start, order):
    assert list(claimed(start)) == order
    assert not [name for name in folder.names() if name.startswith("claim")]


def test_claims_of_the_dead_are_taken_over(claimed, folder, ended, caplog):
    folder.write("claim-00001", claim(HERE, ended, age=1))
    folder.write("claim-00002", claim(ELSEWHERE, 1, age=61))
    assert sorted(claimed()) == [0, 1, 2]
    assert len([each for each in caplog.messages if "is started again" in each]) == 2


@pytest.mark.parametrize("host", [ELSEWHERE, HERE, None])  # None: a claim that is being written
def test_claims_of_the_living_are_waited_for(claimed, folder, host):
    folder.write("claim-00001", claim(host, 1, age=0) if host else b"")
    found = []
    with pytest.raises(TimeoutError):
        found.extend(found.append(number) for number in claimed())
    assert [number for number in found if number is not None] == [0, 2]


def test_starts_that_share_a_folder_agree_on_the_settings(tmp_path, byte_target):
    rows = random_conversations([(3, 4 + number) for number in range(4)], 258, seed=5)
    data_file = write_rows(tmp_path / "train.jsonl", rows)

    def job(output="cache", **settings):
        return cache_job(byte_target, data_file, rows, tmp_path / output, shared=True, shard_megabytes=0.0005, **settings)

    run(job("alone"))
    first, second = job(), job()
    first.prepare()
    claims = first._claims(0)
    assert next(claims.shards()) == 0
    first._write_shard(claims, 0, first._shard_tensors(0))
    assert next(claims.shards()) == 1  # and claimed
    under_way = tmp_path / "cache" / ".shard-00001.safetensors.0badf00d"
    under_way.touch()
    second.prepare()
    assert second.finished() == {0}
    under_way.unlink()  # it is still there, to be renamed by who is writing it
    with pytest.raises(InputError, match="other processes are making a cache of other settings"):
        job(max_length=9).prepare()
    claims.release(1)
    second.work(rank=0, num_processes=1)
    second.finish()
    assert shard_files(tmp_path / "cache").keys() == shard_files(tmp_path / "alone").keys()


def test_a_claim_of_a_container_that_was_started_again_with_the_same_name_and_process_is_taken_over(claimed, folder):
    own = psutil.Process()
    before = {"host": HERE, "process": own.pid, "started": own.create_time() - 60, "time": time.time()}
    folder.write("claim-00001", json.dumps(before).encode())
    assert sorted(claimed()) == [0, 1, 2]
    folder.delete(["shard-00001.safetensors"])
    folder.write("claim-00001", json.dumps(before | {"started": own.create_time()}).encode())
    with pytest.raises(TimeoutError):
        list(claimed())


def test_a_claim_of_another_users_process_is_a_living_ones(folder, monkeypatch):
    def denied(process):
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "create_time", denied)
    claims = Claims(folder=folder, num_shards=1, claim_seconds=60, start=0)
    assert claims.is_alive(claim(HERE, psutil.Process().pid, age=1))

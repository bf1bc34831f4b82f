"""A cache behind a URL is one on a disk; reading keeps nothing open; what cannot be reached is one sentence."""

import os
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from configs.runtime.errors import InputError
from distill.cache import shards
from distill.cache.reader import open_cache
from distill.cache.storage import Folder, Span
from tests.support.caches import batch_of, cache_job, random_conversations, run, shard_files


@pytest.fixture(scope="module")
def conversations():
    return random_conversations([(3, 2 + number) for number in range(24)], 258, seed=5)


@pytest.fixture
def job(data_file, conversations, byte_target):
    """A function that gives the job of making a cache, with a shard for each conversation or two."""

    def make(output, **settings):
        values = {"batch_size": 3, "shard_megabytes": 0.002, "dtype": "float32"} | settings
        return cache_job(byte_target, data_file, conversations, output, **values)

    return make


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}/cache"


class Locked(MemoryFileSystem):
    """A store that knows nobody."""

    protocol = "locked"

    def cat_file(self, path, start=None, end=None, **settings):
        raise ConnectionRefusedError("Unable to locate credentials")

    ls = pipe_file = exists = cat_file


def test_a_cache_behind_a_url_has_the_bytes_and_the_rows_of_one_on_a_disk(
    job, url, tmp_path, data_file, conversations, byte_target
):
    made = run(job(tmp_path / "cache"))
    assert run(job(url)) == made
    behind = Folder(url)
    found = {name: behind.read(name) for name in behind.names() if name != "run.json"}
    assert found == shard_files(tmp_path / "cache")
    batch = batch_of(conversations, [7, 0, 19, 3])
    signals = [
        open_cache(name, data_file, byte_target).signal(batch) for name in (url, tmp_path / "cache", f"file://{tmp_path}/cache")
    ]
    assert torch.equal(signals[0], signals[1])
    assert torch.equal(signals[0], signals[2])


def test_reading_keeps_neither_files_nor_maps_open_and_few_headers(
    job, tmp_path, data_file, conversations, byte_target, monkeypatch
):
    manifest = run(job(tmp_path / "cache"))
    assert manifest.num_shards > 12
    monkeypatch.setattr(shards, "MAX_HEADERS", 4)
    cache = open_cache(tmp_path / "cache", data_file, byte_target)

    def held():
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "shard-" in line]
        return len(os.listdir("/proc/self/fd")), maps

    cache.signal(batch_of(conversations, [0]))
    before = held()
    signals = [cache.signal(batch_of(conversations, [number])) for number in range(24)]
    assert held() == before
    assert before[1] == []
    assert len(cache._shards._headers) == 4
    assert torch.equal(cache.signal(batch_of(conversations, [2])), signals[2])
    cache.signal(batch_of(conversations, range(24)))  # more shards in a batch than headers are kept
    assert len(cache._shards._headers) == 4


def test_spans_of_a_file_come_in_the_order_asked_for_and_end_with_it(tmp_path, url):
    for folder in (Folder(tmp_path), Folder(url)):
        folder.write("a", b"0123456789")
        folder.write("b", b"abc")
        assert folder.spans([Span("b", 1, 9), Span("a", 5, 7), Span("b", 0, 1), Span("a", 0, 2)]) == [b"bc", b"56", b"a", b"01"]
        assert folder.create("c", b"x")
        assert not folder.create("c", b"y")
        assert folder.read("c") == b"x"
        folder.delete(["c", "d"])
        assert folder.names() == {"a", "b"}
        assert folder.read("c") is None


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nosuch://bucket/cache", r"nosuch://bucket/cache cannot be opened: ValueError: Protocol not known: nosuch"),
        ("s3://bucket/cache", r"s3://bucket/cache cannot be opened: its package is not installed here \(Install s3fs"),
        (
            "locked://bucket/cache",
            r"locked://bucket/cache cannot be listed: ConnectionRefusedError: Unable to locate credentials",
        ),
    ],
)
def test_a_store_that_cannot_be_reached_is_one_sentence(job, name, complaint):
    fsspec.register_implementation("locked", Locked, clobber=True)
    if name.startswith("s3") and fsspec.utils.get_package_version_without_import("s3fs"):
        pytest.skip("s3fs is installed")
    with pytest.raises(InputError, match=complaint):
        job(name).prepare()

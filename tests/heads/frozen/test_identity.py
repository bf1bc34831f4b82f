"""A large weight file is hashed once a machine, and again when it is another."""

import hashlib
import json
import os
import threading

import pytest

from heads.frozen import identity
from heads.frozen.identity import hash_files, hash_weights


@pytest.fixture
def read(tmp_path, monkeypatch):
    """The files that were read whole, where every file counts as large."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "known"))
    monkeypatch.setattr(identity, "REMEMBERED_BYTES", 0)
    read, plain = [], identity.sha256_of
    monkeypatch.setattr(identity, "sha256_of", lambda path: read.append(path) or plain(path))
    return read


def expected(*paths):
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()


def test_processes_of_a_machine_read_a_file_once(tmp_path, read):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    found = []
    threads = [threading.Thread(target=lambda: found.append(hash_files([path]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected(path)] * 4
    assert len(read) == 1


def test_a_file_of_other_content_size_time_or_place_is_read_again(tmp_path, read):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    time = path.stat().st_mtime_ns
    hash_files([path])
    path.write_bytes(b"weightz")
    os.utime(path, ns=(time, time))  # as a copy that keeps times
    assert hash_files([path]) == expected(path)
    os.utime(path, ns=(time, time + 1))
    assert hash_files([path]) == expected(path)
    other = path.rename(tmp_path / "other.safetensors")
    assert hash_files([other]) == expected(other)
    assert len(read) == 4


@pytest.mark.parametrize("files", [["model.safetensors"], ["a.safetensors", "b.safetensors"]], ids=["whole", "sharded"])
def test_the_hash_of_weights_is_over_what_transformers_loads(tmp_path, files):
    for name in files:
        (tmp_path / name).write_bytes(name.encode())
    if len(files) > 1:
        index = {"weight_map": {f"model.{number}": name for number, name in enumerate(files)}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    before = hash_weights(tmp_path)
    assert before == expected(*(tmp_path / name for name in files))  # as artifacts of earlier releases record it
    (tmp_path / "consolidated.safetensors").write_bytes(b"the same weights by other names")
    assert hash_weights(tmp_path) == before

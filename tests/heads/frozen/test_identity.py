"""A large weight file is hashed once a machine, and again when it is another."""

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from heads.frozen import identity
from heads.frozen.identity import hash_files, hash_weights


def expected(*paths):
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()


def test_a_large_file_is_read_once_until_content_time_or_place_is_another(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "known"))
    monkeypatch.setattr(identity, "REMEMBERED_BYTES", 0)
    read, plain = [], identity.sha256_of
    monkeypatch.setattr(identity, "sha256_of", lambda path: read.append(path) or plain(path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    time = path.stat().st_mtime_ns
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(hash_files, [[path]] * 4)) == {expected(path)}
    assert len(read) == 1
    path.write_bytes(b"weightz")
    os.utime(path, ns=(time, time))  # as a copy that keeps times
    assert hash_files([path]) == expected(path)
    os.utime(path, ns=(time, time + 1))
    assert hash_files([path]) == expected(path)
    other = path.rename(tmp_path / "other.safetensors")
    assert hash_files([other]) == expected(other)
    assert len(read) == 4
    shutil.copy(other, path)  # with times alike, as on an image that is mounted read-only, which keeps those of its making
    monkeypatch.setattr(identity.os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert hash_files([path]) == hash_files([path]) == expected(path)
    assert len(read) == 6


@pytest.mark.parametrize("files", [["model.safetensors"], ["a.safetensors", "b.safetensors"]], ids=["whole", "sharded"])
def test_the_hash_of_weights_is_over_what_transformers_loads(tmp_path, files):
    for name in files:
        (tmp_path / name).write_bytes(name.encode())
    if len(files) > 1:
        index = {"weight_map": {f"model.{number}": name for number, name in enumerate(files)}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "consolidated.safetensors").write_bytes(b"the same weights by other names")
    assert hash_weights(tmp_path) == expected(*(tmp_path / name for name in files))

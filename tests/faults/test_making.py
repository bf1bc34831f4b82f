"""Data and caches whose making is killed end with the bytes of an undisturbed run; one process at a time makes them."""

import signal
import time
from pathlib import Path

import pytest

from configs.runtime.command import DONE, FAILED
from configs.runtime.run_record import Journal
from distill.cache.writer import BackgroundWrite, CacheJob, make_cache
from distill.generation.make_dataset import make_dataset
from tests.faults.conftest import content, kill_at_call, start_pair


def made(folder):
    """Return the bytes of a data set's conversations."""
    return [(folder / name).read_bytes() for name in ("train.jsonl", "held_out.jsonl")]


@pytest.mark.parametrize(
    ("plant", "then"),
    [
        (kill_at_call(Journal, "extend", 3), None),
        # Moved out of the way, and the new one not yet there: no answer may be asked for again.
        (kill_at_call(Path, "replace", 3, after=True), kill_at_call(Journal, "extend", 1)),
    ],
    ids=["among the answers", "as the old one has gone"],
)
def test_data_whose_making_was_killed_ends_with_the_same_bytes(project, undisturbed, tmp_path, start, plant, then):
    config = project.data(tmp_path / "data")
    killed = start(make_dataset, config, before=plant)
    assert killed.end() == -signal.SIGKILL, killed.said
    assert not (tmp_path / "data" / "manifest.json").exists()
    assert start(make_dataset, config, before=then).end() == DONE
    assert made(tmp_path / "data") == made(undisturbed["data"])
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == {".data.lock"}


def test_one_of_two_processes_that_dies_among_the_answers_ends_the_other_and_nothing_is_lost(
    project, undisturbed, tmp_path, start
):
    config = project.data(tmp_path / "data")
    started = time.monotonic()
    main, other = start_pair(start, make_dataset, config, before=kill_at_call(Journal, "extend", 3))
    assert main.end(60) == FAILED, main.said
    assert time.monotonic() - started < 60
    assert "another process of this run has ended or does not answer" in main.said
    assert other.end() == -signal.SIGKILL
    kept = [path.read_bytes() for path in sorted((tmp_path / "data").glob(".answers.partial-*"))]
    assert [piece.count(b"\n") - 1 for piece in kept] == [24, 8]  # of 48 prompts, half each, by four
    assert start(make_dataset, config, before=kill_at_call(Journal, "extend", 5)).end() == DONE  # alone, the 16 missing
    assert made(tmp_path / "data") == made(undisturbed["data"])


@pytest.mark.parametrize(
    "plant",
    [kill_at_call(BackgroundWrite, "start", 5), kill_at_call(CacheJob, "finish", 1)],
    ids=["among the shards", "before the manifest"],
)
def test_a_cache_whose_making_was_killed_ends_with_the_same_bytes(project, undisturbed, tmp_path, start, plant):
    config = project.cache(tmp_path / "cache")
    killed = start(make_cache, config, before=plant)
    assert killed.end() == -signal.SIGKILL, killed.said
    assert not (tmp_path / "cache" / "manifest.json").exists()
    assert start(make_cache, config).end() == DONE
    found, expected = content(tmp_path / "cache"), content(undisturbed["cache"])
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name] != expected[name]} == {"run.json"}  # names the folder and the time

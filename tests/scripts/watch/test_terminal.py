"""A run in a terminal, and where its output goes into a file; nothing in its files can command the terminal."""

from __future__ import annotations

import io
import sys
import time

import pytest

from scripts.watch import terminal
from scripts.watch.__main__ import main
from tests.support.watched_runs import WatchedRun


@pytest.fixture
def while_it_sleeps(monkeypatch):
    """A function that lets things happen between looks, one after another; nobody waits."""

    def let(*happenings):
        left = iter(happenings)
        monkeypatch.setattr(terminal, "time", type("Clock", (), {"sleep": lambda seconds: next(left)(), "time": time.time}))

    return let


def test_without_a_terminal_a_block_comes_whenever_something_changed_and_the_command_ends_with_the_run(
    run, while_it_sleeps, capsys
):
    def end():
        for name in ("train", "eval", "export"):
            run.end(name)
        run.end("gate", 1)

    while_it_sleeps(lambda: None, lambda: None, end)
    assert main([str(run.folder)]) == 1
    out = capsys.readouterr().out
    assert out.count("A draft for org/some-8b") == 2  # at the beginning and at the end, not at each look
    assert "loss: 3.00 at step 20, 4.00 at step 10" in out
    assert "tau on held-out prompts: 1.50 2.25; best 2.25 at step 20" in out
    assert "time left in all: 0:13:1" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("gate")] == [
        ["gate", "waiting"],
        ["gate", "done:"],
    ]


def test_a_terminal_is_drawn_anew_until_the_run_is_over(run, while_it_sleeps, monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    while_it_sleeps(lambda: None, lambda: run.end("train", 70, done=False))
    assert main([str(run.folder)]) == 70
    assert "train ended with exit code 70" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_once_shows_a_run_under_way_and_ends_well(run, capsys):
    run.show("an accepted\x1b[2J text")
    with (run.folder / "draft.yaml").open("a") as file:
        file.write("num_processes: 2  # one a device\n")
    assert main([str(run.folder), "--once"]) == 0
    out = capsys.readouterr().out
    assert "train: step 20" in out
    assert r"an accepted\x1b[2J text and so on" in out
    assert "num_processes: 2 (one a device)" in out


def test_names_in_files_cannot_command_the_terminal(tmp_path, capsys):
    run = WatchedRun(tmp_path, ["\x1b[2Jx[bold]"])
    run.end("\x1b[2Jx[bold]", 70, done=False)
    (run.folder / "draft.yaml").write_text('target: {name: "\\e]0;title\\a"}\n')
    assert main([str(run.folder), "--once"]) == 70
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count(r"\x1b[2Jx[bold]") == 2
    assert r"\x1b]0;title\x07" in out


def test_a_folder_that_is_no_run_is_refused_in_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1

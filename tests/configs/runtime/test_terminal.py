"""Text from elsewhere cannot command a terminal; progress is a bar there, sparse lines elsewhere, from one process alone."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from configs.runtime import terminal as module
from configs.runtime.terminal import (
    LOGGER,
    PROGRESS_FILE,
    STAGE,
    is_main_process,
    one_line,
    printable,
    progress,
    setup_logging,
)

NAME = "a\x1b[2J\x1b]0;title\x07\x9b1A\r\u202eb\u2066\U000e0041\u200b\u2060"
SHOWN = r"a\x1b[2J\x1b]0;title\x07\x9b1A\r\u202eb\u2066\U000e0041\u200b\u2060"


@pytest.fixture
def clock(monkeypatch):
    """Give a clock that the test moves by hand; it stands at 100 s."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def _fresh_logger(monkeypatch):
    monkeypatch.setattr(LOGGER, "handlers", [])
    level = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    yield
    LOGGER.setLevel(level)


def test_controls_are_written_out_and_every_other_character_stays():
    assert printable(NAME) == SHOWN
    plain = "tab\there\nτ = 1.42×, naïve 日本語 שלום 👩\u200d👩\u200d👧"
    assert printable(plain) == plain
    assert one_line("a\n\x1cgate: pass\u2028b") == "a gate: pass b"
    assert printable("\ud800") == r"\ud800"


# --- progress and the log -------------------------------------------------------------------------------------------


def test_in_a_log_other_libraries_draw_no_bars():
    code = "from configs.runtime.terminal import setup_logging; setup_logging(); from tqdm.auto import tqdm; list(tqdm([1]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_lines_come_at_most_every_ten_seconds_with_count_rate_and_time_left(clock, caplog):
    with progress("answers", 100, "prompts", done=40) as advance:
        for _ in range(60):
            clock.now += 0.5
            advance(1)
    with progress("training", 2, "epochs") as advance:
        clock.now += 240
        advance(0)
        advance(2)
    assert caplog.messages == [
        "answers: 60/100 prompts (60 %), 2 prompts/s, 0:00:20 left",
        "answers: 80/100 prompts (80 %), 2 prompts/s, 0:00:10 left",
        "answers: 60 prompts in 0:00:30, 2 prompts/s",
        "training: 0/2 epochs (0 %), 0 epochs/s, unknown left",
        "training: 2 epochs in 0:04:00, 0.5 epochs/min",  # slow work goes by the minute
    ]


def test_a_stage_of_a_run_writes_how_far_it_is_at_most_every_two_seconds(clock, monkeypatch, tmp_path):
    path, written = tmp_path / "progress.json", []
    clock.time = lambda: 1000.0 + clock.now
    monkeypatch.setenv(PROGRESS_FILE, str(path))
    monkeypatch.setenv(STAGE, "data")
    with progress("answers", 100, "prompts", done=40) as advance:
        for _ in range(30):
            clock.now += 0.25
            advance(1)
            written.append(path.read_text())
        found = {"description": "answers", "done": 64, "total": 100, "unit": "prompts", "rate": 4.0, "share": 0.64}
        assert json.loads(written[-1]) == found | {"stage": "data", "seconds_left": 9.0, "time": 1106.0}
        assert len(set(written)) == 4
        advance(30)
    assert json.loads(path.read_text())["done"] == 100
    assert [each.name for each in tmp_path.iterdir()] == ["progress.json"]


@pytest.mark.parametrize("terminal", [False, True])
def test_only_rank_0_writes_it_and_a_full_disk_stops_nothing(terminal, monkeypatch, tmp_path):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    path = tmp_path / "folder" / "progress.json"
    monkeypatch.setenv(PROGRESS_FILE, str(path))
    with progress("answers", 2) as advance:
        advance(2)  # the folder is not there
    path.parent.mkdir()
    monkeypatch.setenv("RANK", "1")
    with progress("answers", 2) as advance:
        advance(2)
    assert not path.exists()
    monkeypatch.setenv("RANK", "0")
    with progress("answers", 2) as advance:
        advance(1)
        advance(1)
    assert json.loads(path.read_text())["done"] == 2


def test_an_error_inside_is_passed_on_without_a_line_that_says_done(caplog):
    with pytest.raises(RuntimeError, match="device"), progress("decoding", 4):
        raise RuntimeError("device")
    assert caplog.messages == []


def test_a_terminal_gets_a_bar_with_the_rate_and_no_lines(monkeypatch, caplog):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("decoding", 3, "prompts") as advance, progress("held-out", 1):  # evaluation during training
        advance(3)
    assert all(shown in terminal.getvalue() for shown in ("decoding", "held-out", "3/3", "prompts/s"))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("environment", "main"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
    ],
)
def test_only_rank_0_of_all_machines_together_logs_more_than_errors(environment, main, monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_main_process() is main
    setup_logging()
    setup_logging()
    LOGGER.info("target loaded")
    LOGGER.error("lost the device")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("INFO target loaded\n") == main
    assert err.count("ERROR lost the device\n") == 1

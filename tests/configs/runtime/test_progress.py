"""Progress: a bar on a terminal, sparse lines elsewhere, silence on all ranks but one."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from configs.runtime import progress as module
from configs.runtime.progress import LOGGER, Tokens, is_main_process, progress, setup_logging, track


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


def test_in_a_log_other_libraries_draw_no_bars():
    code = "from configs.runtime.progress import setup_logging; setup_logging(); from tqdm.auto import tqdm; list(tqdm([1]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_lines_come_at_most_every_ten_seconds_with_count_rate_and_time_left(clock, caplog):
    for _ in track(range(100), description="writing answers", unit="prompts"):
        clock.now += 0.5
    for _ in track(range(2), description="training", unit="epochs"):
        clock.now += 120
    assert caplog.messages[0] == "writing answers: 20/100 prompts (20 %), 2 prompts/s, 0:00:40 left"
    assert caplog.messages[4] == "writing answers: 100 prompts in 0:00:50, 2 prompts/s"
    assert caplog.messages[-1] == "training: 2 epochs in 0:04:00, 0.5 epochs/min"  # slow work goes by the minute


def test_what_was_finished_before_counts_for_the_share_and_not_for_the_rate(clock, caplog):
    with progress("answers", 100, "prompts", done=40) as advance:
        clock.now += 20
        advance(20)
        clock.now += 20
        advance(40)
    assert caplog.messages[0] == "answers: 60/100 prompts (60 %), 1 prompts/s, 0:00:40 left"
    assert caplog.messages[-1] == "answers: 60 prompts in 0:00:40, 1.5 prompts/s"


def test_tokens_tell_the_time_left_before_the_first_text_has_ended(clock, caplog):
    tokens = Tokens()
    tokens.expect(1000)
    with progress("answers", 10, "prompts", tokens=tokens) as advance:
        clock.now += 20
        tokens.write(80)
        tokens.end(100, 20)
        advance(1)
        clock.now += 20
        tokens.write(0)
    assert caplog.messages[0] == "answers: 0/10 prompts (8 %), 4 tokens/s, 0:03:50 left"  # at most: 920 tokens
    # The text that has ended filled a fifth of its limit; those under way have 60 tokens already.
    assert caplog.messages[1] == "answers: 1/10 prompts (10 %), 2 tokens/s, 0:06:00 left"


def test_kinds_of_texts_fill_different_shares_of_their_limits():
    tokens = Tokens()
    for kind in ("long", "short", "not seen yet"):
        tokens.expect(400, kind)
    for kind, length in (("long", 100), ("short", 20)):
        tokens.write(length, kind)
        tokens.end(100, length, kind)
    assert tokens.left == 300 + 60 + 0.6 * 400
    tokens.end(400, 0, "not seen yet")  # none was written after all
    assert tokens.left == 300 + 60


def test_short_work_leaves_one_line(clock, caplog):
    with progress("packing", 4, "rows") as advance:
        advance(1)
        advance(3)
        clock.now += 2
    assert caplog.messages == ["packing: 4 rows in 0:00:02, 2 rows/s"]


def test_without_a_total_there_is_no_time_left(clock, caplog):
    for _ in track(iter(range(4)), description="reading", unit="lines"):
        clock.now += 6
    assert caplog.messages[0] == "reading: 2 lines, 0.167 lines/s"
    assert caplog.messages[-1] == "reading: 4 lines in 0:00:24, 0.167 lines/s"


def test_nothing_done_in_no_time_is_no_division_by_zero(clock, caplog):
    assert list(track([], description="reading")) == []
    with progress("waiting", 3) as advance:
        clock.now += 20
        advance(0)
    assert caplog.messages == [
        "reading: 0 it in 0:00:00, 0 it/s",
        "waiting: 0/3 it (0 %), 0 it/s, unknown left",
        *caplog.messages[2:],
    ]


def test_an_error_inside_is_passed_on_without_a_line_that_says_done(caplog):
    with pytest.raises(RuntimeError, match="device"), progress("decoding", 4):
        raise RuntimeError("device")
    assert caplog.messages == []


def test_a_terminal_gets_a_bar_with_the_rate_and_no_lines(monkeypatch, caplog):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    tokens = Tokens()
    tokens.expect(9)
    with progress("answers", 3, tokens=tokens):
        tokens.write(3)
    for _ in track(range(3), description="decoding", unit="prompts"):
        # A second bar inside the first: evaluation during training.
        assert list(track([1], description="held-out")) == [1]
    assert all(shown in terminal.getvalue() for shown in ("decoding", "held-out", "3/3", "prompts/s", "tokens/s"))
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
def test_the_main_process_is_rank_0_of_all_machines_together(environment, main, monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_main_process() is main


@pytest.mark.parametrize(("rank", "said"), [("0", True), ("1", False)])
def test_the_log_goes_to_stderr_from_rank_0_once_however_often_it_is_set_up(rank, said, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    setup_logging()
    setup_logging()
    LOGGER.info("target loaded")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("INFO target loaded\n") == said
    LOGGER.error("lost the device")
    assert "ERROR lost the device" in capsys.readouterr().err

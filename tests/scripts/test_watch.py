"""What a run's files say of it in every state, in a terminal and a log; files may be half written."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from configs.runtime import terminal
from configs.runtime.errors import InputError
from configs.runtime.files import write_json, write_text
from configs.runtime.terminal import PROGRESS_FILE, STAGE
from scripts.run.steps import Record
from scripts.watch import __main__ as watch
from scripts.watch.reading import find_run, read_run
from scripts.watch.view import headline
from train.loop.telemetry import HELD_OUT, MetricsFile

STAGES = ("data", "train", "eval", "gate", "export")
MINUTES = {"data": 6.0, "train": 10.0, "eval": 3.0, "gate": 0.1, "export": 0.2}


class WatchedRun:
    """A run in a folder, whose stages begin and end as a test says."""

    def __init__(self, folder, stages=STAGES, minutes=MINUTES):
        write_text(folder / "draft.yaml", 'target: {name: "org/some-8b"}\noutput: "runs/x"\n')
        self.folder, self.record, self.under_way = folder, Record(folder, stages, minutes), {}

    def begin(self, name, minutes_ago=0.0):
        began = max([time.time() - 60 * minutes_ago, *(each["began"] for each in self.record.steps.values())])
        with patch.dict(os.environ), patch("scripts.run.steps.time", SimpleNamespace(time=lambda: began)):
            step = self.record.step(name, name)
            self.under_way[name] = step, step.__enter__()

    def end(self, name, code=0, *, done=True, minutes=1.0):
        if name not in self.under_way:
            self.begin(name, minutes)
        step, entry = self.under_way.pop(name)
        entry.update({"done": done} | ({} if code is None else {"code": code}))
        step.__exit__(None, None, None)

    @contextmanager
    def progress(self, stage, *arguments, **settings):
        """Yield what `configs.runtime.terminal.progress` does, in the environment of a stage of this run."""
        os.environ.update({PROGRESS_FILE: str(self.folder / "progress.json"), STAGE: stage})
        try:
            with terminal.progress(*arguments, **settings) as advance:
                yield advance
        finally:
            del os.environ[PROGRESS_FILE], os.environ[STAGE]

    def train_some(self, losses, taus):
        """Write a training's metrics: losses and tokens per target step by step."""
        (self.folder / "train").mkdir(exist_ok=True)
        file = MetricsFile(self.folder / "train", done_steps=0, evaluated_steps=0)
        for step, loss in losses.items():
            file.add(step, 1.0 * step, {"loss": loss, "acceptance": 0.5})
        for step, tau in taus.items():
            file.add(step, 1.0 * step, {f"{HELD_OUT}tokens_per_target_step": tau})

    def show(self, *texts):
        """Write samples of an evaluation, of each text an accepted piece, a rejected one, and one of the target's."""
        kinds = {"accepted": "", "rejected": " or not", "target": " and so on"}
        pieces = [[{"kind": kind, "text": each or text} for kind, each in kinds.items()] for text in texts]
        common = {"prompt_id": "p1/0", "category": "", "prompt": "What is it?", "tokens_per_target_step": 2.5}
        write_json(
            self.folder / "train" / "samples.json", {"step": 40, "samples": [common | {"pieces": each} for each in pieces]}
        )

    def age(self, minutes):
        """Let what was written be older."""
        then = time.time() - 60 * minutes
        for path in self.folder.rglob("*.*"):
            os.utime(path, (then, then))
        progress = self.folder / "progress.json"
        if progress.is_file():
            progress.write_text(json.dumps(json.loads(progress.read_text()) | {"time": then}))
            os.utime(progress, (then, then))


@pytest.fixture
def run(tmp_path):
    return WatchedRun(tmp_path / "run")


@pytest.fixture
def in_training(run):
    """A run in its training."""
    run.end("data", minutes=5.0)
    run.begin("train", minutes_ago=4.0)
    run.train_some({10: 4.0, 20: 3.0}, {10: 1.5, 20: 2.25, 30: 2.0})
    return run


def states(found):
    return {stage.name: stage.state for stage in found.stages}


def test_a_run_under_way_says_how_far_it_is_and_how_much_is_left(in_training):
    with in_training.progress("train", "training", 100, "steps", done=40):
        found = read_run(in_training.folder)
    assert states(found) == {"data": "done", "train": "running", "eval": "waiting", "gate": "waiting", "export": "waiting"}
    assert (found.state, found.is_over, found.target) == ("running", False, "org/some-8b")
    assert (found.progress.done, found.progress.total, found.progress.share) == (40, 100, 0.4)
    assert [point.value for point in found.losses] == [4.0, 3.0]
    assert found.best == (20, 2.25)
    assert found.stages[1].used_minutes == pytest.approx(4.0, abs=0.1)
    # No step was taken by this process, so the plan tells: 6 minutes of the training, and 3.3 of the stages to come.
    assert found.seconds_left == pytest.approx(60 * 9.3, abs=5)
    assert "40 of 100 steps (40 %)" in headline(found)


def test_time_left_is_by_progress_where_that_is_of_the_whole_stage(run):
    run.begin("train", minutes_ago=2.0)  # eight minutes of the plan are left
    path = run.folder / "progress.json"
    with run.progress("train", "training", 100, "steps"):
        values = json.loads(path.read_text())
        path.write_text(json.dumps(values | {"seconds_left": 300.0}))
        assert read_run(run.folder).seconds_left == pytest.approx(300 + 60 * 9.3)
    run.end("train")
    run.begin("eval", minutes_ago=1.0)  # whose progress is that of one of its parts: two minutes of the plan are left
    path.write_text(json.dumps(values | {"stage": "eval", "description": "decoding", "seconds_left": 10.0}))
    assert read_run(run.folder).seconds_left == pytest.approx(60 * (2.0 + 0.3 + 6.0), abs=5)


@pytest.mark.parametrize(("code", "state", "exit_code"), [(70, "failed", 70), (143, "stopped", 143), (None, "stopped", 143)])
def test_a_run_that_broke_off_says_where_and_with_what(run, code, state, exit_code):
    run.end("data")
    run.end("eval", code, done=False)
    found = read_run(run.folder)
    assert (found.state, found.is_over, found.exit_code, found.seconds_left) == (state, True, exit_code, None)
    assert "eval" in headline(found)


def test_what_was_done_or_broke_off_before_a_stage_that_runs_again_is_to_come_again(run):
    run.end("train", 70, done=False)
    run.end("eval")
    run.begin("data")
    assert states(read_run(run.folder)) == dict.fromkeys(STAGES, "waiting") | {"data": "running"}


@pytest.mark.parametrize(("gate", "check", "code"), [(0, 0, 0), (3, 0, 3), (1, 3, 1)])
def test_a_run_that_has_ended_has_the_worst_verdict(tmp_path, gate, check, code):
    run = WatchedRun(tmp_path, (*STAGES, "check"))
    for name, ended in {"data": 0, "train": 0, "eval": 0, "gate": gate, "export": 0, "check": check}.items():
        run.end(name, ended)
    found = read_run(run.folder)
    assert (found.state, found.is_over, found.exit_code) == ("ended", True, code)


def test_a_run_that_has_died_is_given_up_after_half_an_hour(run):
    run.begin("train", minutes_ago=30.0)
    with run.progress("train", "training", 100, "steps"):
        run.age(12.0)
        dead = read_run(run.folder)
        run.age(40.0)
        given_up = read_run(run.folder)
    assert (dead.state, dead.is_over) == ("silent", False)
    assert "no sign of life for 12 minutes" in headline(dead)
    assert dead.stages[1].used_minutes == pytest.approx(18.0, abs=0.1)  # up to its last sign
    assert (given_up.is_over, given_up.exit_code) == (True, 70)


@pytest.mark.parametrize("name", ["steps.json", "progress.json", "train/metrics.jsonl", "train/samples.json", "draft.yaml"])
@pytest.mark.parametrize("damage", ["missing", "half", "other", "numbers"])
def test_any_file_may_be_missing_half_written_or_of_another_make(in_training, name, damage):
    in_training.show("so it is")
    with in_training.progress("train", "training", 100, "steps"):
        path = in_training.folder / name
        content = path.read_text()
        if damage == "missing":
            path.unlink()
        else:
            other = content.replace("10", '"<b>ten</b>"').replace("true", "7").replace("2.5", "NaN").replace("3.0", "NaN")
            path.write_text({"half": content[: len(content) // 2], "other": "[1, 2]", "numbers": other}[damage])
        found = read_run(in_training.folder)
    assert headline(found)
    assert all(isinstance(each.step, int) and math.isfinite(each.value) for each in (*found.losses, *found.taus))
    assert found.exit_code == 0


def test_a_folder_that_is_no_run_is_refused(run, tmp_path, capsys):
    run.begin("data")
    assert find_run(str(run.folder / "draft.yaml")) == run.folder
    with pytest.raises(InputError, match="holds no run"):
        find_run(str(tmp_path))
    assert watch.main([str(tmp_path / "rum")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- what is shown ------------------------------------------------------------------------------------------------


@pytest.fixture
def while_it_sleeps(monkeypatch):
    """A function that lets things happen between looks, one after another; nobody waits."""

    def let(*happenings):
        left = iter(happenings)
        monkeypatch.setattr(watch, "time", type("Clock", (), {"sleep": lambda seconds: next(left)(), "time": time.time}))

    return let


def test_in_a_log_a_block_comes_whenever_something_changed_and_the_command_ends_with_the_run(
    in_training, while_it_sleeps, capsys
):
    def end():
        for name, ended in {"train": 0, "eval": 0, "gate": 1, "export": 0}.items():
            in_training.end(name, ended)
        for name in ("eval/report.html", "export/vllm/serve.txt"):
            (in_training.folder / name).parent.mkdir(parents=True)
            (in_training.folder / name).touch()

    while_it_sleeps(lambda: None, lambda: None, end)
    assert watch.main([str(in_training.folder)]) == 1
    out = capsys.readouterr().out
    assert out.count("org/some-8b") == 2  # at the beginning and at the end, not at each look
    assert "loss: 3.00 at step 20, 4.00 at step 10" in out
    assert "1.50 2.25 2.00; best 2.25 at step 20" in out
    assert "report.html" in out
    assert "how vllm serves it" in out
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("gate")][-1] == ["gate", "done:", "fail"]


def test_a_terminal_is_drawn_anew_until_the_run_is_over(in_training, while_it_sleeps, monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    while_it_sleeps(lambda: None, lambda: in_training.end("train", 70, done=False))
    assert watch.main([str(in_training.folder)]) == 70
    assert "train ended with exit code 70" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_once_shows_a_run_under_way_and_ends_well(in_training, capsys):
    in_training.show("an accepted text")
    assert watch.main([str(in_training.folder), "--once"]) == 0
    assert "an accepted text and so on" in capsys.readouterr().out

"""What a run's files say of it in every state; files may be missing or half written."""

from __future__ import annotations

import os
import time

import pytest

from configs.runtime.errors import InputError
from configs.runtime.files import write_json, write_text
from configs.runtime.terminal import PROGRESS_FILE, STAGE, progress
from scripts.watch import __main__ as watch
from scripts.watch.__main__ import headline
from scripts.watch.reading import find_run, read_run
from train.loop.telemetry import HELD_OUT, MetricsFile

MINUTES = {"data": 6.0, "train": 10.0, "eval": 3.0, "gate": 0.1, "export": 0.2}


def ended(code=0, *, done=True, minutes=1.0, ago=60.0):
    """The record of a stage that has ended, begun so many minutes ago."""
    return {"job": "", "done": done, "code": code, "began": time.time() - 60 * ago, "seconds": 60 * minutes}


def begun(ago):
    return {"job": "", "done": False, "began": time.time() - 60 * ago}


def record(folder, **steps):
    """Write a run whose stages became what is given."""
    if not (folder / "draft.yaml").is_file():
        write_text(folder / "draft.yaml", "")
        write_json(folder / "run.json", {"config": {"target": {"name": "org/some-8b"}}})
    stages = [*MINUTES, *(name for name in steps if name not in MINUTES)]
    write_json(folder / "steps.json", {"stages": stages, "planned_minutes": MINUTES, "steps": steps})
    return folder


def note(folder, stage="train", description="training", seconds_left=None):
    """Write how far a stage is: 40 of 100 steps."""
    counts = {"done": 40, "total": 100, "unit": "steps", "rate": 0.0, "share": 0.4}
    values = {"stage": stage, "description": description, "seconds_left": seconds_left, "time": time.time()}
    write_json(folder / "progress.json", counts | values)


@pytest.fixture
def in_training(tmp_path):
    """The folder of a run in its training."""
    folder = record(tmp_path / "run", data=ended(minutes=5.0), train=begun(4.0))
    (folder / "train").mkdir()
    file = MetricsFile(folder / "train", done_steps=0, evaluated_steps=0)
    for step, loss in {10: 4.0, 20: 3.0}.items():
        file.add(step, 1.0 * step, {"loss": loss})
    for step, tau in {10: 1.5, 20: 2.25, 30: 2.0}.items():
        file.add(step, 1.0 * step, {f"{HELD_OUT}tokens_per_target_step": tau})
    note(folder)
    return folder


def states(found):
    return {stage.name: stage.state for stage in found.stages}


def test_a_run_under_way_says_how_far_it_is_and_how_much_is_left(in_training):
    found = read_run(in_training)
    assert states(found) == {"data": "done", "train": "running", "eval": "waiting", "gate": "waiting", "export": "waiting"}
    assert (found.state, found.is_over, found.target) == ("running", False, "org/some-8b")
    assert found.stages[1].used_minutes == pytest.approx(4.0, abs=0.1)
    # No step was taken by this process, so the plan tells: 6 minutes of the training, and 3.3 of the stages to come.
    assert found.seconds_left == pytest.approx(60 * 9.3, abs=5)
    assert "40 of 100 steps (40 %)" in headline(found)


def test_time_left_is_by_progress_where_that_is_of_the_whole_stage(in_training):
    note(in_training, seconds_left=300.0)
    assert read_run(in_training).seconds_left == pytest.approx(300 + 60 * 3.3)
    record(in_training, data=ended(), train=ended(ago=9.0), eval=begun(1.0))
    note(in_training, "eval", "decoding", 10.0)  # one of its parts: two minutes of the plan are left
    assert read_run(in_training).seconds_left == pytest.approx(60 * (2.0 + 0.3), abs=5)


def test_progress_is_read_as_the_stages_write_it(in_training, monkeypatch):
    monkeypatch.setenv(PROGRESS_FILE, str(in_training / "progress.json"))
    monkeypatch.setenv(STAGE, "train")
    with progress("training", 10, "steps") as advance:
        advance(10)
    assert "10 of 10 steps" in headline(read_run(in_training))


@pytest.mark.parametrize(("code", "state", "exit_code"), [(70, "failed", 70), (143, "stopped", 143), (None, "stopped", 143)])
def test_a_run_that_broke_off_says_where_and_with_what(tmp_path, code, state, exit_code):
    found = read_run(record(tmp_path, data=ended(), eval=ended(code, done=False, ago=9.0)))
    assert (found.state, found.is_over, found.exit_code, found.seconds_left) == (state, True, exit_code, None)
    assert "eval" in headline(found)


def test_what_was_done_or_broke_off_before_a_stage_that_runs_again_is_to_come_again(tmp_path):
    found = read_run(record(tmp_path, train=ended(70, done=False), eval=ended(ago=9.0), data=begun(1.0)))
    assert states(found) == dict.fromkeys(MINUTES, "waiting") | {"data": "running"}


@pytest.mark.parametrize(("gate", "check", "code"), [(0, 0, 0), (3, 0, 3), (1, 3, 1)])
def test_a_run_that_has_ended_has_the_worst_verdict(tmp_path, gate, check, code):
    codes = dict.fromkeys(MINUTES, 0) | {"gate": gate, "check": check}
    found = read_run(record(tmp_path, **{name: ended(ended_with) for name, ended_with in codes.items()}))
    assert (found.state, found.is_over, found.exit_code) == ("ended", True, code)


def test_a_run_that_has_died_is_given_up_after_half_an_hour(in_training):
    record(in_training, data=ended(), train=begun(30.0))
    (in_training / "progress.json").unlink()
    found = []
    for minutes in (12.0, 40.0):
        then = time.time() - 60 * minutes
        for path in in_training.rglob("*.*"):
            os.utime(path, (then, then))
        found.append(read_run(in_training))
    assert [(each.state, each.is_over, each.exit_code) for each in found] == [("silent", False, 0), ("silent", True, 70)]
    assert "no sign of life for 12 minutes" in headline(found[0])
    assert found[0].stages[1].used_minutes == pytest.approx(18.0, abs=0.1)  # up to its last sign


@pytest.mark.parametrize("name", ["steps.json", "progress.json", "train/metrics.jsonl", "run.json"])
@pytest.mark.parametrize("kept", [0.0, 0.5], ids=["missing", "half"])
def test_any_file_may_be_missing_or_half_written(in_training, name, kept):
    path = in_training / name
    content = path.read_text()
    path.unlink()
    if kept:
        path.write_text(content[: int(kept * len(content))])
    found = read_run(in_training)
    assert headline(found)
    assert found.exit_code == 0


def test_a_folder_that_is_no_run_is_refused(in_training, tmp_path, capsys):
    assert find_run(str(in_training / "draft.yaml")) == in_training
    with pytest.raises(InputError, match="holds no run"):
        find_run(str(tmp_path))
    assert watch.main([str(tmp_path / "rum")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_block_comes_whenever_something_changed_and_the_command_ends_with_the_run(in_training, monkeypatch, capsys):
    def end(seconds):
        record(in_training, **{name: ended(int(name == "gate")) for name in MINUTES})
        (in_training / "export" / "vllm").mkdir(parents=True)
        (in_training / "export" / "vllm" / "serve.txt").touch()

    sleeps = iter([lambda seconds: None, end])
    monkeypatch.setattr("time.sleep", lambda seconds: next(sleeps)(seconds))
    assert watch.main([str(in_training), "--once"]) == 0
    assert watch.main([str(in_training)]) == 1
    out = capsys.readouterr().out
    assert out.count("org/some-8b") == 3  # once, and then at the beginning and at the end, not at each look
    assert "loss: 3.00 at step 20, 4.00 at step 10" in out
    assert "1.50 2.25 2.00; best 2.25 at step 20" in out
    assert "serve.txt" in out
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("gate")][-1] == ["gate", "done:", "fail"]

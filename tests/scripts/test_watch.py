"""What a run's files say of it in every state, in a terminal, a log and on its page; files may be half written."""

from __future__ import annotations

import io
import json
import math
import sys
import time

import pytest

from configs.runtime.errors import InputError
from scripts.watch import __main__ as watch
from scripts.watch.reading import find_run, read_run
from scripts.watch.view import headline, page_kept, write_page
from tests.support.watched_runs import STAGES, WatchedRun


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

    while_it_sleeps(lambda: None, lambda: None, end)
    assert watch.main([str(in_training.folder)]) == 1
    out = capsys.readouterr().out
    assert out.count("org/some-8b") == 2  # at the beginning and at the end, not at each look
    assert "loss: 3.00 at step 20, 4.00 at step 10" in out
    assert "1.50 2.25 2.00; best 2.25 at step 20" in out
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


def test_the_page_is_kept_while_the_run_goes_on_and_leads_to_the_results(in_training, tmp_path):
    page = in_training.folder / "index.html"
    with page_kept(in_training.folder, seconds=0.01):
        while not page.exists() or "train: step 30" not in page.read_text():
            time.sleep(0.01)
        assert "http-equiv" in page.read_text()
        for name in ("train", "eval", "gate", "export"):
            in_training.end(name)
        for name in ("eval/report.html", "export/vl lm/serve.txt"):
            (in_training.folder / name).parent.mkdir(parents=True)
            (in_training.folder / name).write_text("")
    assert all(f'href="{path}"' in page.read_text() for path in ("eval/report.html", "export/vl%20lm/serve.txt", "draft.yaml"))
    assert "http-equiv" not in page.read_text()
    with page_kept(tmp_path / "refused"):
        pass
    assert not (tmp_path / "refused").exists()


def test_a_page_that_cannot_be_written_stops_nothing(run, monkeypatch):
    (run.folder / "index.html").mkdir()
    write_page(run.folder)
    monkeypatch.setattr("scripts.watch.view.read_run", lambda folder: 1 / 0)
    with page_kept(run.folder):
        pass

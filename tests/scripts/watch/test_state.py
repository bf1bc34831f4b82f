"""What a run's files say of it: in every state that it can be in, and where files are missing, half written or hostile."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.runtime.errors import InputError
from configs.runtime.files import folder_lock
from configs.schema.commands.running import RunConfig
from scripts.run.draft_file import Choice, apply, write_draft_file
from scripts.watch import text
from scripts.watch.reading import find_run, read_run
from tests.support.watched_runs import STAGES, WatchedRun

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path):
    return WatchedRun(tmp_path / "run")


def states(found):
    return {stage.name: stage.state for stage in found.stages}


def test_a_run_under_way_says_how_far_it_is_and_how_much_is_left(run):
    run.end("data", minutes=5.0)
    run.begin("train", minutes_ago=4.0)
    run.train_some({10: 4.0, 20: 3.0}, {10: 1.5, 20: 2.25, 30: 2.0})
    with run.progress("train", "training", 100, "steps", done=40):
        found = read_run(run.folder)
    assert states(found) == {"data": "done", "train": "running", "eval": "waiting", "gate": "waiting", "export": "waiting"}
    assert found.state == "running"
    assert not found.is_over
    assert found.target == "org/some-8b"
    assert (found.progress.done, found.progress.total, found.progress.share) == (40, 100, 0.4)
    assert [point.value for point in found.losses] == [4.0, 3.0]
    assert found.best == (20, 2.25)
    assert found.stages[1].used_minutes == pytest.approx(4.0, abs=0.1)
    # No step was taken by this process, so the plan tells: 6 minutes of the training, and 3.3 of the stages to come.
    assert found.seconds_left == pytest.approx(60 * 9.3, abs=5)
    assert "train: training, 40 of 100 steps (40 %)" in text.headline(found)


def test_time_left_is_by_progress_where_that_is_of_the_whole_stage(run, monkeypatch):
    run.begin("train", minutes_ago=2.0)  # eight minutes of the plan are left
    with run.progress("train", "training", 100, "steps"):
        path = run.folder / "progress.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds_left": 300.0}))
        assert read_run(run.folder).seconds_left == pytest.approx(300 + 60 * 9.3)
    run.end("train")
    run.begin("eval", minutes_ago=1.0)  # whose progress is that of one of its parts: two minutes of the plan are left
    path.write_text(json.dumps({**_progress(), "stage": "eval", "seconds_left": 10.0}))
    assert read_run(run.folder).seconds_left == pytest.approx(60 * (2.0 + 0.3 + 6.0), abs=5)


def _progress():
    common = {"description": "decoding", "done": 1, "total": 2, "unit": "prompts", "rate": 0.5, "rate_unit": "prompts"}
    return common | {"share": 0.5, "time": 2e9}


@pytest.mark.parametrize(
    ("code", "done", "state", "exit_code", "said"),
    [
        (70, False, "failed", 70, "eval ended with exit code 70; the same command goes on"),
        (143, False, "stopped", 143, "eval ended with exit code 143"),
        (None, False, "stopped", 143, "eval was stopped; the same command goes on"),
    ],
)
def test_a_run_that_broke_off_says_where_and_with_what(run, code, done, state, exit_code, said):
    run.end("data")
    run.end("train")
    run.end("eval", code, done=done)
    found = read_run(run.folder)
    assert (found.state, found.is_over, found.exit_code) == (state, True, exit_code)
    assert said in text.headline(found)
    assert found.seconds_left is None


def test_a_stage_that_an_earlier_attempt_broke_off_at_is_to_come_again(run):
    run.end("train", 70, done=False)
    run.begin("data")
    found = read_run(run.folder)
    assert states(found) == {"data": "running", "train": "waiting", "eval": "waiting", "gate": "waiting", "export": "waiting"}
    run.end("data")
    with folder_lock(run.folder, beside=True):
        assert read_run(run.folder).state == "running"


def test_what_was_done_before_a_stage_that_runs_again_is_to_come_again(run):
    for name in ("data", "train", "eval"):
        run.end(name)
    run.begin("data")
    assert states(read_run(run.folder)) | {"data": "running"} == dict.fromkeys(STAGES, "waiting") | {"data": "running"}


def test_the_choices_of_a_run_come_with_their_reasons(run):
    made = [
        Choice("recipe", "configs/heads/medusa.yaml", 'the engine takes it # "so"'),
        Choice("train.schedule.epochs", 3, "what fits into the budget"),
    ]
    write_draft_file(apply(RunConfig(output=str(run.folder), train={"data.max_length": 64}), made), made)
    file = run.folder / "draft.yaml"
    file.write_text(file.read_text() + "gate: by-hand.yaml  # as we like it\n")
    assert read_run(run.folder).choices == (
        ("recipe", "configs/heads/medusa.yaml", 'the engine takes it # "so"'),
        ("train.schedule.epochs", 3, "what fits into the budget"),
        ("gate", "by-hand.yaml", "as we like it"),
    )


@pytest.mark.parametrize(("gate", "check", "code"), [(0, 0, 0), (3, 0, 3), (1, 3, 1)])
def test_a_run_that_has_ended_has_the_worst_verdict(tmp_path, gate, check, code):
    run = WatchedRun(tmp_path, (*STAGES, "check"))
    for name in ("data", "train", "eval"):
        run.end(name)
    run.end("gate", gate)
    run.end("export")
    run.end("check", check)
    found = read_run(run.folder)
    assert (found.state, found.is_over, found.exit_code) == ("ended", True, code)


def test_a_run_that_has_died_is_told_from_one_that_is_busy(run):
    run.begin("train", minutes_ago=30.0)
    with run.progress("train", "training", 100, "steps"):
        run.age(12.0)
        dead = read_run(run.folder)
        assert dead.state == "silent"
        assert text.silence(dead).startswith("no sign of life for 12 minutes")
        assert dead.stages[1].used_minutes == pytest.approx(18.0, abs=0.1)  # up to its last sign
        with folder_lock(run.folder, beside=True):
            busy = read_run(run.folder)
        assert busy.state == "running"
        assert text.silence(busy) == "at work, but nothing was written for 12 minutes"
        with folder_lock(run.folder / "train"):  # a stage that outlived the command that began it
            assert read_run(run.folder).state == "running"
        assert not dead.is_over
        run.age(40.0)
        given_up = read_run(run.folder)
    assert (given_up.is_over, given_up.exit_code) == (True, 70)


def test_looking_takes_no_lock(run):
    run.begin("train")
    with folder_lock(run.folder, beside=True):
        pass
    found = read_run(run.folder)  # the lock's file is there, and nobody holds it
    assert not found.is_locked
    with folder_lock(run.folder, beside=True):
        assert read_run(run.folder).is_locked


@pytest.mark.parametrize("name", ["steps.json", "progress.json", "train/metrics.jsonl", "train/samples.json", "draft.yaml"])
@pytest.mark.parametrize("damage", ["missing", "half", "other", "numbers"])
def test_any_file_may_be_missing_half_written_or_of_another_make(run, name, damage):
    run.begin("train")
    run.train_some({10: 4.0, 20: 3.0}, {10: 1.5})
    run.show("so it is")
    with run.progress("train", "training", 100, "steps"):
        path = run.folder / name
        content = path.read_text()
        if damage == "missing":
            path.unlink()
        else:
            other = content.replace("10", '"<b>ten</b>"').replace("true", "7").replace("2.5", "NaN").replace("3.0", "NaN")
            path.write_text({"half": content[: len(content) // 2], "other": "[1, 2]", "numbers": other}[damage])
        found = read_run(run.folder)
    assert text.headline(found)
    for value in (*found.losses, *found.taus):
        assert isinstance(value.step, int)
        assert math.isfinite(value.value)
    assert found.exit_code == 0


def test_a_record_of_an_older_version_is_read(tmp_path):
    steps = {"data": {"job": "a", "done": True}, "head": {"job": "b", "done": False}}
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    assert states(read_run(tmp_path)) == {"data": "done", "head": "running"}


def test_a_folder_that_is_no_run_is_refused_with_the_nearest_that_is_one(run, tmp_path):
    run.begin("data")
    assert find_run(str(run.folder / "draft.yaml")) == run.folder
    for wrong, said in (("rum", "is not there"), ("", "holds no run, neither steps.json nor metrics.jsonl")):
        with pytest.raises(InputError, match=rf"{said}; name the folder .* such as .*run"):
            find_run(str(tmp_path / wrong))


def ended(tau, *, kind="eagle3", tree=None, state="ended"):
    """A run that has ended with a head of three drafts a round."""
    decode = SimpleNamespace(num_speculative_tokens=3, tree=tree)
    acceptance = SimpleNamespace(tokens_per_target_step=tau)
    report = SimpleNamespace(decode=decode, acceptance=acceptance, draft=SimpleNamespace(kind=kind))
    return SimpleNamespace(state=state, report=report)


def test_what_twice_the_answers_would_bring_is_a_share_of_what_a_round_misses():
    assert "bring 0.13 tokens per target step more" in text.outlook(ended(1.9))
    assert "bring 0.06 tokens per target step more" in text.outlook(ended(3.0))
    assert "bring 0.00 tokens" in text.outlook(ended(4.0))
    assert {text.outlook(ended(1.9, **other)) for other in ({"kind": "draft_lm"}, {"tree": {}}, {"state": "running"})} == {""}


def test_the_exponent_is_the_one_measured():
    rows = json.loads((ROOT / "docs" / "results" / "curve.json").read_text())["rows"]
    (law,) = [row for row in rows if (row["row"], row["family"], row["suite"]) == ("law", "eagle3", "home")]
    assert round(law["exponent"], 3) == text.EXPONENT

"""Stages of a run: finished ones stay finished, verdicts stop nothing, and what was started ends with the command."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.runtime.command import BAD_INPUT, DONE, FAILED, GATE_FAILED, INCONCLUSIVE, INTERRUPTED, TERMINATED
from configs.runtime.errors import Stopped
from scripts.run import stages
from scripts.run.steps import LAUNCH, Record, run_step, stop

ROOT = Path(__file__).resolve().parents[3]
# A step as `accelerate launch` is one: a parent that waits for a child, which tells its number and sleeps.
SLEEP = "import pathlib, os, time; pathlib.Path('child').write_text(str(os.getpid())); time.sleep(600)"
LAUNCHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"


@pytest.fixture
def run_two(tmp_path, monkeypatch):
    """A function that runs a gate and a check of these settings, which return these codes; `ran` has how often each has run."""
    ran = {"gate": 0, "check": 0}

    def start(settings=("a", "b"), codes=(DONE, DONE)):
        setting, code = dict(zip(ran, settings, strict=True)), dict(zip(ran, codes, strict=True))

        def work(run, stage):
            ran[stage] += 1
            (tmp_path / stage).mkdir(exist_ok=True)
            (tmp_path / stage / "made").write_text(setting[stage])
            return code[stage]

        monkeypatch.setattr(stages, "decided_by", lambda run, stage: setting[stage])
        monkeypatch.setattr(stages, "run_stage", work)
        run = SimpleNamespace(stages=("dry_run", *ran), output=str(tmp_path), minutes={"gate": 1.0})
        return stages.run_stages(run, "inputs")

    start.ran = ran
    return start


def test_a_stage_runs_again_only_where_it_or_one_before_it_has_changed(run_two, tmp_path):
    assert run_two() == run_two() == DONE
    assert run_two.ran == {"gate": 1, "check": 1}
    run_two(settings=("a", "c"))
    assert run_two.ran == {"gate": 1, "check": 2}
    assert (tmp_path / "check.before-1" / "made").read_text() == "b"  # what was made by other settings is kept
    run_two(settings=("d", "c"))
    assert run_two.ran == {"gate": 2, "check": 3}


@pytest.mark.parametrize(
    ("codes", "worst"), [((1, 0), GATE_FAILED), ((0, 3), INCONCLUSIVE), ((1, 3), GATE_FAILED), ((1, 2), BAD_INPUT)]
)
def test_verdicts_stop_nothing_and_the_worst_is_the_code_also_when_it_is_read_again(run_two, codes, worst):
    assert run_two(codes=codes) == worst
    assert run_two.ran == {"gate": 1, "check": 1}
    assert run_two(codes=codes) == worst
    assert run_two.ran == {"gate": 1, "check": 2 if BAD_INPUT in codes else 1}  # a verdict is a result, bad input is none


def test_a_stage_takes_as_long_as_it_takes_whatever_the_clock_is_set_to(tmp_path, monkeypatch):
    clock = iter((1000.0, 0.0))
    monkeypatch.setattr("scripts.run.steps.time", SimpleNamespace(time=lambda: next(clock), monotonic=time.monotonic))
    with Record(tmp_path, ["gate"], {}).step("gate", "job") as entry:
        pass
    assert 0.0 <= entry["seconds"] < 60


def test_a_launchers_one_is_a_failure_and_another_commands_one_a_verdict(monkeypatch):
    assert run_step(["-c", "raise SystemExit(1)"]) == GATE_FAILED
    monkeypatch.setattr(sys, "executable", "false")
    assert run_step([*LAUNCH, "recipe.yaml"]) == FAILED


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
def test_stopping_a_command_stops_what_it_started(tmp_path, stop, code):
    script = (
        # A shell starts what runs in its background with Ctrl-C ignored, and these tests may run there.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"import sys; sys.path[0] = {str(ROOT)!r}; from scripts.run import steps; "
        "from configs.runtime.command import exit_code; steps.GRACE_SECONDS = 2; "
        f"signal.signal(signal.SIGTERM, steps.stop); sys.exit(exit_code(lambda: steps.run_step(['-c', {LAUNCHER!r}])))"
    )
    running = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    child = tmp_path / "child"
    until = time.monotonic() + 60
    while not (child.exists() and child.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    running.send_signal(stop)
    try:
        assert running.wait(30) == code
    finally:
        running.kill()
    assert not living(int(child.read_text()))


def test_a_stop_while_a_step_is_started_ends_that_step(monkeypatch):
    started, start = [], subprocess.Popen._execute_child

    def stopped(process, *arguments):
        start(process, *arguments)
        started.append(process.pid)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", stopped)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(Stopped):
            run_step(["-c", "import time; time.sleep(60)"])
        assert not living(started[0])
    finally:
        signal.signal(signal.SIGTERM, before)


def living(process: int) -> bool:
    """Return whether a process runs; one that has ended may be listed until it is asked for."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"

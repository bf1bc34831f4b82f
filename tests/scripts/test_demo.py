"""The demo's frame: --help starts nothing, finished steps stay finished, and what it started ends with it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.runtime.command import BAD_INPUT, DONE, FAILED, INTERRUPTED, TERMINATED
from configs.runtime.errors import Stopped
from scripts import demo
from scripts import steps as shared

ENTRY = Path(__file__).resolve().parents[2] / "scripts" / "demo.py"
WRITE = "import os, sys; os.makedirs('runs/demo', exist_ok=True); open(sys.argv[1], 'a').write('ran ')"
# A step as `accelerate launch` is one: a parent that waits for a child, which tells its number and sleeps.
SLEEP = "import pathlib, os, time; pathlib.Path('child').write_text(str(os.getpid())); time.sleep(600)"
LAUNCH = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """The steps, to be changed: two that write into a file of their names."""
    names = {name: ["-c", WRITE, f"runs/demo/{name}"] for name in ("one", "two")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "STEPS", names)
    before = signal.getsignal(signal.SIGTERM)
    yield names
    signal.signal(signal.SIGTERM, before)


def ran(tmp_path):
    """How often each step has run."""
    return [(tmp_path / "runs" / "demo" / name).read_text().count("ran") for name in ("one", "two")]


def test_finished_steps_are_run_again_only_when_asked_or_when_something_before_them_changed(steps, tmp_path, capsys):
    assert demo.main([]) == DONE
    assert demo.main([]) == DONE
    assert ran(tmp_path) == [1, 1]
    assert "== one: already finished" in capsys.readouterr().out
    steps["two"] = [*steps["two"], "more"]
    assert demo.main([]) == DONE
    assert ran(tmp_path) == [1, 2]
    steps["one"] = [*steps["one"], "more"]
    assert demo.main([]) == DONE
    assert ran(tmp_path) == [2, 3]
    assert demo.main(["--fresh"]) == DONE
    assert ran(tmp_path) == [1, 1]


def test_a_step_that_failed_is_where_the_next_run_goes_on(steps, tmp_path):
    whole = steps["two"]
    steps["two"] = ["-c", "import sys; sys.exit(2)"]
    assert demo.main([]) == BAD_INPUT
    steps["two"] = whole
    assert demo.main([]) == DONE
    assert ran(tmp_path) == [1, 1]


@pytest.mark.parametrize(("codes", "worst"), [((1, 0), 1), ((0, 3), 3), ((1, 3), 1), ((1, 2), 2)])
def test_both_gates_judge_and_the_worse_verdict_is_the_code(steps, codes, worst, tmp_path):
    for name, code in zip(steps, codes, strict=True):
        steps[name] = ["-c", f"{WRITE}; sys.exit({code})", f"runs/demo/{name}", "eval/gate.py"]
    assert demo.main([]) == worst
    assert ran(tmp_path) == [1, 1]
    steps["one"] = ["-c", "raise SystemExit(1)"]  # of a launcher
    assert demo.main([]) == FAILED


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
def test_stopping_it_stops_what_it_started(tmp_path, stop, code):
    script = (
        # A shell starts what runs in its background with Ctrl-C ignored, and these tests may run there.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"import sys; sys.path[0] = {str(ENTRY.parents[1])!r}; from scripts import demo, steps; "
        f"demo.STEPS = {{'train': ['-c', {LAUNCH!r}]}}; steps.GRACE_SECONDS = 2; "
        "sys.exit(demo.main([]))"
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
    before = signal.signal(signal.SIGTERM, shared.stop)
    try:
        with pytest.raises(Stopped):
            shared.run_step(["-c", "import time; time.sleep(60)"])
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

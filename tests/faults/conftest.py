"""Runs of a second on a tiny target, and what they end with when nothing disturbs them."""

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, PartialState

from configs.runtime.command import DONE
from distill.cache.writer import make_cache
from distill.generation.make_dataset import make_dataset
from scripts.check.vllm_server import free_port
from tests.support.children import Child
from tests.support.tiny_project import STEPS, TinyProject
from tests.support.training_runs import read_evaluations
from train.launch import run_distillation
from train.loop.telemetry import METRICS_FILE
from train.tasks.draft import DraftTask


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """A target, prompts and data; only for reading."""
    project = TinyProject(tmp_path_factory.mktemp("project"))
    try:
        project.create()
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()
    return project


@pytest.fixture(scope="session")
def undisturbed(project):
    """The output of a distillation, of data making and of a cache, none of them disturbed; only for reading."""
    outputs = {name: project.folder / "undisturbed" / name for name in ("distill", "data", "cache")}
    works = {"distill": run_distillation, "data": make_dataset, "cache": make_cache}
    children = [
        Child(works[name], getattr(project, name)(output), project.folder, f"undisturbed-{name}")
        for name, output in outputs.items()
    ]
    for child in children:
        assert child.end() == 0, child.said
    return outputs


@pytest.fixture
def start(tmp_path):
    """A function that starts a command in a child that can be killed; children still at work are killed at the end."""
    children = []

    def start(main, config, **settings):
        child = Child(main, config, tmp_path, f"child-{len(children)}", **settings)
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()


@pytest.fixture
def distilled(project, tmp_path, start):
    """A function that distils in a child to the end and returns the child; settings go to its schedule."""

    def distil(**schedule):
        child = start(run_distillation, project.distill(tmp_path / "run", **schedule))
        child.end()
        return child

    return distil


@pytest.fixture
def goes_on(distilled, tmp_path, undisturbed):
    """A function that distils what a fault has left to the end, and finds the weights and scores of an undisturbed run."""

    def finish(**schedule):
        child = distilled(**schedule)
        assert child.process.exitcode == DONE, child.said
        assert final_weights(tmp_path / "run") == final_weights(undisturbed["distill"])
        assert scores(tmp_path / "run") == scores(undisturbed["distill"])
        return child

    return finish


def scores(output: Path) -> list[dict[str, float]]:
    """Return what the held-out decoding of a run found, without the time it took."""
    rows = read_evaluations(output / METRICS_FILE)
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def start_pair(start, main, config, before=None) -> list[Child]:
    """Start a command in two processes that know of each other, with a fault planted in the second."""
    port = str(free_port())
    return [
        start(
            main,
            config,
            before=before if rank == "1" else None,
            environment={
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "ACCELERATE_USE_CPU": "true",
            },
        )
        for rank in "01"
    ]


def content(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def final_weights(output: Path, steps: int = STEPS) -> tuple[bytes, ...]:
    """Return the trained weights and the optimiser's after the last step, and the artifact's."""
    last = output / "checkpoints" / f"step-{steps:08d}"
    files = (last / "model.safetensors", last / "optimizer.bin", output / "artifact" / "model.safetensors")
    return tuple(path.read_bytes() for path in files)


# --- faults, planted in a child -------------------------------------------------------------------------------------


def send_here(number: signal.Signals) -> None:
    """Send a signal to this process."""
    os.kill(os.getpid(), number)


def kill_here() -> None:
    send_here(signal.SIGKILL)


def at_call(owner, name: str, number: int, act, *, after: bool = False):
    """Return a fault: `act` is called at the call of a function for that time, before or after its work."""

    def plant() -> None:
        plain, calls = getattr(owner, name), itertools.count(1)

        def watched(*args, **kwargs):
            due = next(calls) == number
            if due and not after:
                act()
            outcome = plain(*args, **kwargs)
            if due and after:
                act()
            return outcome

        setattr(owner, name, watched)

    return plant


def kill_at_call(owner, name: str, number: int, *, after: bool = False):
    return at_call(owner, name, number, kill_here, after=after)


def die_at_step(number: int):
    """Return a fault: the process is killed in a step, when the checkpoint before is written."""

    def die() -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("write"):  # of configs.runtime.files
                thread.join()
        time.sleep(1)  # another process may not have all of this one's gradients yet
        kill_here()

    return at_call(DraftTask, "loss", number, die)

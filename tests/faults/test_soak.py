"""The soak: tiny runs killed, stopped or damaged at random end with the bytes of an undisturbed run.

`pytest -m soak`; the environment variable SOAK_ROUNDS sets how often each kind of fault is tried, 5 by default (minutes).
"""

import os
import random
import signal
import time

import pytest

from configs.runtime.command import DONE, TERMINATED
from distill.cache.writer import make_cache
from distill.generation.make_dataset import make_dataset
from tests.support.children import Child
from tests.support.tiny_project import EVERY, STEPS
from train.launch import run_distillation, run_heads
from train.loop.checkpoints import list_checkpoints, read_manifest

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "5"))
MAX_DISTURBANCES = 3  # of a run, before it is left to end
WORKS = {"distill": run_distillation, "heads": run_heads, "data": make_dataset, "cache": make_cache}
TRAINED = (f"checkpoints/step-{STEPS:08d}/*.safetensors", f"checkpoints/step-{STEPS:08d}/*.bin", "artifact/*.safetensors")
# What is compared: bytes that no path or time goes into.
RESULTS = {
    "distill": TRAINED,
    "heads": TRAINED,
    "data": ("train.jsonl", "held_out.jsonl"),
    "cache": ("*.safetensors", "manifest.json"),
}
FAULTS = [("distill", "kill"), ("heads", "kill"), ("distill", "stop"), ("heads", "stop"), ("distill", "kill and damage")]
FAULTS += [("data", "kill"), ("cache", "kill")]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def undisturbed(project):
    """A function that returns what a work makes when nothing disturbs it, and the seconds that takes."""
    known = {}

    def of(work):
        if work not in known:
            output, started = project.folder / "soak" / work, time.monotonic()
            output.parent.mkdir(exist_ok=True)
            assert begin(project, work, output).end() == DONE
            known[work] = content(output, work), time.monotonic() - started
        return known[work]

    return of


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize(("work", "fault"), FAULTS)
def test_a_run_disturbed_at_random_ends_with_an_undisturbed_runs_bytes(project, undisturbed, tmp_path, work, fault, number):
    expected, seconds = undisturbed(work)
    dice, output = random.Random(f"{work}/{fault}/{number}"), tmp_path / "output"
    for _ in range(dice.randint(1, MAX_DISTURBANCES)):
        child = begin(project, work, output)
        child.process.join(dice.uniform(0, seconds))
        if child.process.exitcode is not None:
            break
        disturb(child, fault)
        if fault == "kill and damage":
            damage(output, dice)
        elif work in ("distill", "heads"):
            assert child.steps - newest_step(output) <= EVERY
    last = begin(project, work, output)
    assert last.end() == DONE, last.said
    assert content(output, work) == expected


def begin(project, work, output):
    return Child(WORKS[work], getattr(project, work)(output), output.parent, f"{output.name}-{work}")


def disturb(child, fault):
    if fault != "stop":
        child.kill()
        return
    os.kill(child.process.pid, signal.SIGTERM)
    assert child.end() in (TERMINATED, -signal.SIGTERM, DONE), child.said  # before and after training it ends the process


def damage(output, dice):
    """Cut short, or flip a bit of, a file of the newest checkpoint, unless it is the only one."""
    found = list_checkpoints(output / "checkpoints")
    if len(found) < 2:
        return
    path = dice.choice(sorted(found[-1].iterdir()))
    content = bytearray(path.read_bytes())
    if dice.random() < 0.5:
        content = content[: dice.randrange(len(content) - 1)]  # a byte more could be the newline that a JSON file can lack
    else:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def newest_step(output):
    found = list_checkpoints(output / "checkpoints")
    return read_manifest(found[-1]).step if found else 0


def content(output, work):
    paths = [path for pattern in RESULTS[work] for path in output.glob(pattern)]
    assert paths
    return {str(path.relative_to(output)): path.read_bytes() for path in paths}

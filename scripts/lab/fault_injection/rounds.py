"""The soak: tiny runs are killed, stopped or damaged at random, resumed, and compared byte for byte with an undisturbed run."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, PartialState

from configs.runtime.command import DONE, GATE_FAILED, TERMINATED
from configs.runtime.terminal import progress
from distill.cache.writer import make_cache
from distill.generation.make_dataset import make_dataset
from scripts.lab.bench.harness import write_results
from scripts.lab.fault_injection.children import Child
from scripts.lab.fault_injection.setup import EVERY, STEPS, TinyProject
from scripts.lab.settings import SoakConfig
from train.launch import run_distillation, run_heads
from train.loop.checkpoints import list_checkpoints, read_manifest

WORKS: dict[str, Callable[..., Any]] = {
    "distill": run_distillation,
    "heads": run_heads,
    "data": make_dataset,
    "cache": make_cache,
}
TRAINED = (f"checkpoints/step-{STEPS:08d}/*.safetensors", f"checkpoints/step-{STEPS:08d}/*.bin", "artifact/*.safetensors")
# What is compared: bytes that no path or time goes into.
RESULTS = {
    "distill": TRAINED,
    "heads": TRAINED,
    "data": ("train.jsonl", "held_out.jsonl"),
    "cache": ("*.safetensors", "manifest.json"),
}

logger = logging.getLogger("draftsmith")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to a run: killed at random moments; stopped by SIGTERM; or killed, and its newest checkpoint damaged."""

    name: str
    work: str
    stop: bool = False
    damage: bool = False


FAULTS = (
    Fault(name="kill a distillation", work="distill"),
    Fault(name="kill a head's training", work="heads"),
    Fault(name="SIGTERM to a distillation", work="distill", stop=True),
    Fault(name="SIGTERM to a head's training", work="heads", stop=True),
    Fault(name="kill, then damage the newest checkpoint", work="distill", damage=True),
    Fault(name="kill data making", work="data"),
    Fault(name="kill a cache's making", work="cache"),
)


@dataclass(frozen=True, kw_only=True)
class SoakRound:
    fault: str
    disturbances: int  # kills and stops that met a running child
    lost_steps: int | None  # most steps that were done twice after one of them; None where there are no steps
    cut_writes: int  # disturbances that left something half-written
    final_weights_equal: bool


def soak(config: SoakConfig) -> int:
    folder = Path(config.folder or tempfile.mkdtemp(prefix="soak-"))
    rounds = run_rounds(config, folder)
    rows = [_row(fault, [each for each in rounds if each.fault == fault.name]) for fault in FAULTS]
    rows = [row for row in rows if row["rounds"]]
    write_results(config.output, "soak", config, rows=rows, ratios={})
    for row in rows:
        logger.info("%s", ", ".join(f"{name} {value}" for name, value in row.items()))
    good = all(row["final_weights_equal"] and (row["lost_steps"] or 0) <= EVERY for row in rows)
    if good and config.folder is None:
        shutil.rmtree(folder)
    return DONE if good else GATE_FAILED


def run_rounds(config: SoakConfig, folder: Path) -> list[SoakRound]:
    folder.mkdir(parents=True, exist_ok=True)
    project = TinyProject(folder / "project")
    if not (folder / "project" / "data").exists():
        project.create()
        AcceleratorState._reset_state()
        PartialState._reset_state()
    references = {name: _reference(project, name, folder / "undisturbed" / name) for name in WORKS}
    rounds = []
    with progress("soak", config.rounds, "rounds") as advance:
        for number in range(config.rounds):
            fault = FAULTS[number % len(FAULTS)]
            output = folder / f"round-{number:05d}"
            rng = random.Random(f"{config.seed}/{number}")
            rounds.append(_run_round(project, fault, output, references[fault.work], rng, config.max_kills))
            if rounds[-1].final_weights_equal:
                shutil.rmtree(output)
            else:
                logger.error("round %d (%s) did not end as it should; its files are in %s", number, fault.name, output)
            advance(1)
    return rounds


@dataclass(frozen=True, kw_only=True)
class _Reference:
    content: dict[str, bytes]
    seconds: float


def _reference(project: TinyProject, work: str, output: Path) -> _Reference:
    started = time.monotonic()
    shutil.rmtree(output, ignore_errors=True)
    child = _start(project, work, output)
    if child.end() != DONE:
        raise RuntimeError(f"an undisturbed run failed: {child.said}")
    return _Reference(content=_content(output, work), seconds=time.monotonic() - started)


def _start(project: TinyProject, work: str, output: Path) -> Child:
    output.parent.mkdir(parents=True, exist_ok=True)
    return Child(WORKS[work], getattr(project, work)(output), output.parent, f"{output.name}-{work}")


def _run_round(
    project: TinyProject, fault: Fault, folder: Path, reference: _Reference, rng: random.Random, max_kills: int
) -> SoakRound:
    output = folder / "output"
    counts_steps = fault.work in ("distill", "heads") and not fault.damage
    lost: list[int] = []
    disturbances = cut_writes = 0
    for _ in range(rng.randint(1, max_kills)):
        child = _start(project, fault.work, output)
        child.process.join(rng.uniform(0, reference.seconds))
        if child.process.exitcode is not None:
            break
        _disturb(child, stop=fault.stop)
        disturbances += 1
        cut_writes += any(folder.rglob(".*.partial")) or any(folder.rglob(".*.[0-9a-f]*"))
        if fault.damage:
            _damage(output, rng)
        elif counts_steps:
            lost.append(child.steps - _newest_step(output))
    last = _start(project, fault.work, output)
    equal = last.end() == DONE and _content(output, fault.work) == reference.content
    return SoakRound(
        fault=fault.name,
        disturbances=disturbances,
        lost_steps=max(lost, default=0) if counts_steps else None,
        cut_writes=cut_writes,
        final_weights_equal=equal,
    )


def _disturb(child: Child, *, stop: bool) -> None:
    if not stop:
        child.kill()
        return
    os.kill(child.process.pid or 0, signal.SIGTERM)
    # Before and after training the signal ends the process itself.
    if (code := child.end()) not in (TERMINATED, -signal.SIGTERM, DONE):
        raise RuntimeError(f"a run that was asked to stop ended with {code}: {child.said}")


def _damage(output: Path, rng: random.Random) -> None:
    """Cut short, or flip a bit of, a file of the newest checkpoint, unless it is the only one."""
    found = list_checkpoints(output / "checkpoints")
    if len(found) < 2:
        return
    path = rng.choice(sorted(found[-1].iterdir()))
    content = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        content = content[: rng.randrange(len(content) - 1)]  # a byte more could be the newline that a JSON file can lack
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _newest_step(output: Path) -> int:
    found = list_checkpoints(output / "checkpoints")
    return read_manifest(found[-1]).step if found else 0


def _content(output: Path, work: str) -> dict[str, bytes]:
    paths = [path for pattern in RESULTS[work] for path in output.glob(pattern)]
    return {str(path.relative_to(output)): path.read_bytes() for path in paths}


def _row(fault: Fault, rounds: Sequence[SoakRound]) -> dict[str, Any]:
    return {
        "fault": fault.name,
        "rounds": len(rounds),
        "disturbances": sum(each.disturbances for each in rounds),
        "cut_writes": sum(each.cut_writes for each in rounds),
        "lost_steps": max((each.lost_steps for each in rounds if each.lost_steps is not None), default=None),
        "final_weights_equal": all(each.final_weights_equal for each in rounds),
    }

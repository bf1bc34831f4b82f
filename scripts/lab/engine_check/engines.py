"""Engines as child processes: a job in, answers out, each in its own environment.

A driver is a script of this folder that imports the engine and none of this project's packages, because the engine's
environment does not have them. It is run as `python DRIVER job.json answers.json`. The job:

    {"target": folder, "draft": folder or null, "kind": ..., "serve": text of the export's serve.txt or null,
     "dtype": "float32", "num_speculative_tokens": 3 or null, "threads": 1, "folder": a place for files,
     "environment": the engine's folder, "prompts": [{"tokens": [ids], "first": [id], "length": 64}]}

Without a draft the engine decodes plainly. Greedy always, one prompt at a time, after a warm-up; the answer to a prompt has
`length` tokens or more and no end-of-text ends it; `first` is its first token. The answers:

    {"version": ..., "answers": [{"tokens": [ids], "rounds": 40, "accepted": 24, "seconds": 1.5}]}

with rounds and accepted drafts as the engine counts them, defined in `engine_check.ours`; both 0 for plain decoding.
An engine that tells each round apart gives `accepted_by_round` in place of both, and may go on beyond `length`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import read_json, write_json
from scripts.lab.engine_check.ours import Counts, count_rounds
from scripts.run.steps import end_group

SCRIPTS = Path(__file__).resolve().parent
SHOWN = 3000  # characters of a failed engine's last output
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, kw_only=True)
class EngineDriver:
    driver: Path
    form: str  # what an export for it is called (`heads.formats.exporting.exporter.FORMS`)
    environment: str | None = None  # its folder among the environments; None: this project's own
    needs: str = "bin/python"  # a file in that folder without which it is not installed
    has_python: bool = False  # that folder has the interpreter that runs the driver; else this project's does
    cuts: bool = False  # it drafts no further than an answer goes
    whole_head: frozenset[str] = frozenset()  # kinds of draft for which it takes the target's whole output head
    variables: Mapping[str, str] = field(default_factory=dict)


ENGINES = {
    "vllm": EngineDriver(
        driver=SCRIPTS / "run_vllm.py",
        form="vllm",
        environment="vllm",
        has_python=True,
        whole_head=frozenset({"mtp"}),
        variables=VLLM,
    ),
    "transformers": EngineDriver(
        driver=SCRIPTS / "run_transformers.py", form="transformers", whole_head=frozenset({"mtp", "dflash"})
    ),
    "llama_cpp": EngineDriver(
        driver=SCRIPTS / "run_llama_cpp.py",
        form="gguf",
        environment="llama_cpp",
        needs="bin/llama-server",
        cuts=True,
        whole_head=frozenset({"dflash"}),
    ),
    "openvino": EngineDriver(driver=SCRIPTS / "run_openvino.py", form="openvino", environment="openvino", has_python=True),
}


@dataclass(frozen=True)
class EngineAnswer:
    tokens: tuple[int, ...]  # perhaps more than were asked for
    counts: Counts
    seconds: float  # wall-clock, the prompt's forward included


@dataclass(frozen=True)
class EngineRun:
    version: str
    answers: list[EngineAnswer]


def run_engine(
    name: str, job: Mapping[str, Any], folder: Path, *, environments: Path, threads: int, timeout_seconds: float
) -> EngineRun:
    engine, place = ENGINES[name], find_engine(name, environments)
    folder.mkdir(parents=True)
    files = folder / "job.json", folder / "answers.json"
    write_json(files[0], {**job, "threads": threads, "folder": str(folder), "environment": str(place)})
    _run(engine, place, folder, files, threads, timeout_seconds)
    found = read_json(files[1], f"answers of {name}")
    if len(found["answers"]) != len(job["prompts"]):
        raise RuntimeError(f"{name} answered {len(found['answers'])} of {len(job['prompts'])} prompts")
    lengths = [prompt["length"] for prompt in job["prompts"]]
    return EngineRun(found["version"], [_answer(*pair) for pair in zip(found["answers"], lengths, strict=True)])


def find_engine(name: str, environments: Path) -> Path | None:
    """Return the folder of an engine's environment, which must be installed; None for this project's own."""
    engine = ENGINES[name]
    if engine.environment is None:
        return None
    place = (environments / engine.environment).absolute()
    if not (place / engine.needs).exists():
        raise InputError(f"{name} is not installed: {place / engine.needs} is missing; `make serve-check` installs it")
    return place


def _answer(found: Mapping[str, Any], length: int) -> EngineAnswer:
    if not found.get("accepted_by_round"):
        counts = Counts(found.get("rounds", 0), found.get("accepted", 0))
    else:
        counts = count_rounds(found["accepted_by_round"], length)
    return EngineAnswer(tuple(found["tokens"]), counts, found["seconds"])


def _run(
    engine: EngineDriver, place: Path | None, folder: Path, files: tuple[Path, Path], threads: int, timeout_seconds: float
) -> None:
    python = place / "bin" / "python" if place is not None and engine.has_python else Path(sys.executable)
    log = folder / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            [str(python), str(engine.driver), *map(str, files)],
            cwd=folder,
            env={**os.environ, **OFFLINE, **engine.variables, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process, 0)
    if code != 0 or not files[1].exists():
        ended = f"was still running after {timeout_seconds:.0f} s" if code is None else f"ended with code {code}"
        raise RuntimeError(f"{engine.driver.name} {ended}:\n" + log.read_text(errors="replace")[-SHOWN:])

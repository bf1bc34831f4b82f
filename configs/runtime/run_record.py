"""What a run leaves beside its results: what it was made with, `run.json`, and a journal from which it goes on.

The environment is never recorded, and secrets are masked (`configs.runtime.redaction`). Imports no torch: the record is written
before anything slow begins. A journal has a line for each finished piece of a long job, synced before the next piece begins.
Its first line is the job's fingerprint; pieces of another job are not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from configs.runtime.errors import InputError
from configs.runtime.files import CHECKOUT, write_json
from configs.runtime.redaction import mask_arguments, mask_secrets

logger = logging.getLogger("draftsmith")

METRICS_FILE = "metrics.jsonl"  # of a training: a line for each log line and each evaluation
HELD_OUT = "held_out/"  # before the names of an evaluation's metrics there
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "torchmetrics", "draftsmith")
MIB = 2**20
RECORD = "run.json"
NO_DOCUMENTS = (".", ":(exclude)docs", ":(exclude)README.md")  # what git looks at
PROBE_SECONDS = 20  # git status of a large checkout on a network disk can be slow


def write_run_record(folder: Path, config: BaseModel, **extra: Any) -> Path:
    """Write `run.json` into a command's output folder and return its path; `extra` are further JSON values."""
    record = {
        "command": mask_arguments(sys.orig_argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": mask_secrets(config.model_dump(mode="json")),
        "versions": describe_versions(),
        "git": describe_git(),
        "hardware": describe_hardware(),
        **mask_secrets(extra),
    }
    path = folder / RECORD
    write_json(path, record)
    return path


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a result; those not installed are left out."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def describe_git(root: Path = CHECKOUT) -> dict[str, Any]:
    """Return the checkout's `commit` and whether it is `dirty`; None where git cannot tell.

    Documents do not count, which no run reads: a measurement writes its results there before the next one begins.
    """
    commit = output_of(["git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD"])
    changes = output_of(["git", "-C", str(root), "status", "--porcelain", "--", *NO_DOCUMENTS])
    return {"commit": None, "dirty": None} if not commit or changes is None else {"commit": commit, "dirty": bool(changes)}


def describe_hardware() -> dict[str, Any]:
    """Return the processor's name, the cores this process may use, the memory in bytes, and the NVIDIA GPUs."""
    known = Path("/proc/cpuinfo")
    text = known.read_text(encoding="utf-8") if known.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    gpus = [line.rsplit(", ", 2) for line in (output_of(query) or "").splitlines()]
    return {
        "cpu": found[1].strip() if found else platform.processor() or platform.machine(),
        # In a container or under taskset these are fewer than there are.
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": [  # one cut into instances may report "[N/A]" for its memory
            {"name": name, "memory_bytes": int(mebibytes) * MIB if mebibytes.isdigit() else None, "driver": driver}
            for name, mebibytes, driver in gpus
        ],
    }


def output_of(command: list[str]) -> str | None:
    """Return what a command prints, None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# --- the journal of a long job -----------------------------------------------------------------------------------------


def fingerprint(*parts: Any) -> str:
    """Return a hash of JSON values, which should be all that decides a job's pieces."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def fingerprint_of(values: Iterable[Any]) -> str:
    """Return `fingerprint` of a list of JSON values, of which one at a time is in memory."""
    total = hashlib.sha256(b"[[")
    for number, value in enumerate(values):
        total.update((", " if number else "").encode() + json.dumps(value, sort_keys=True).encode())
    total.update(b"]]")
    return total.hexdigest()


class Place(NamedTuple):
    """Where a piece lies in a journal, in bytes."""

    start: int
    length: int


class Journal:
    """The pieces of one job, which its fingerprint tells from others, by key. One writer a file."""

    def __init__(self, path: Path, job: str) -> None:
        self.path = path
        self._header = json.dumps({"job": job}).encode() + b"\n"
        self._length: int | None = None  # bytes up to the end of the last whole piece; None until the file was read

    def read(self) -> dict[str, Any]:
        """Return the finished pieces; none where there is no file or it is another job's."""
        return {key: piece for key, _, piece in self.scan()}

    def scan(self) -> Iterator[tuple[str, Place, Any]]:
        """Yield the finished pieces, each with its key and its place; of equal keys the last counts."""
        length = 0
        if self.path.exists():
            with self.path.open("rb") as file:
                length = len(self._header) if file.readline() == self._header else 0
                for line in file if length else ():
                    entry = _parse_piece(line)
                    if entry is None:
                        break
                    yield entry["key"], Place(length, len(line)), entry["piece"]
                    length += len(line)
        self._length = length

    def piece(self, place: Place) -> Any:
        """Return the piece at a place."""
        with self.path.open("rb") as file:
            file.seek(place.start)
            return json.loads(file.read(place.length))["piece"]

    def append(self, key: str, piece: Any) -> None:
        """Keep a finished piece."""
        self.extend({key: piece})

    def extend(self, pieces: Mapping[str, Any]) -> None:
        """Keep finished pieces; they are on the disk when this returns."""
        if self._length is None:
            for _ in self.scan():
                pass
        length = self._length or 0
        lines = b"".join(json.dumps({"key": key, "piece": piece}).encode() + b"\n" for key, piece in pieces.items())
        new = lines if length else self._header + lines
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("r+b" if self.path.exists() else "wb") as file:
                if not length and file.seek(0, os.SEEK_END):
                    logger.info("%s was left by a run with other settings; starting anew", self.path)
                file.truncate(length)
                file.seek(length)
                file.write(new)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._length = length + len(new)


def _parse_piece(line: bytes) -> dict[str, Any] | None:
    """Return a line's entry; None where it was cut off or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("key"), str) and "piece" in entry else None

"""What a run was made with, kept beside its results so that numbers can be traced: `run.json`.

The environment is never recorded, and secrets are masked (`configs.runtime.redaction`). Imports no torch: the record is written
before anything slow begins.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.runtime.files import CHECKOUT, write_json
from configs.runtime.redaction import mask_arguments, mask_secrets

METRICS_FILE = "metrics.jsonl"  # of a training: a line for each log line and each evaluation
HELD_OUT = "held_out/"  # before the names of an evaluation's metrics there
SAMPLES_FILE = "samples.json"  # of a training: some answers of the last evaluation
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

"""What a result was made with: the command, the resolved config, versions, git state, hardware.

Written beside everything a command makes, so that a number can be traced. The environment is never recorded, and secrets
are masked (`configs.redaction`). Imports no torch: the record is written before anything slow begins.
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

from configs.files import write_json
from configs.redaction import mask_arguments, mask_secrets

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "torchmetrics", "draftsmith")
MIB = 2**20
PROBE_SECONDS = 20  # git status of a large checkout on a network disk can be slow


def write_run_record(folder: Path, config: BaseModel, **extra: Any) -> Path:
    """Write `run.json` into `folder` and return its path.

    Args:
        folder: where the command's results go; made if missing.
        config: the resolved config.
        extra: further JSON values, kept under their names.

    Raises:
        InputError: the folder cannot be written.
    """
    record = {
        "command": mask_arguments(sys.orig_argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": mask_secrets(config.model_dump(mode="json")),
        "versions": describe_versions(),
        "git": describe_git(),
        "hardware": describe_hardware(),
        **mask_secrets(extra),
    }
    path = folder / "run.json"
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


def describe_git(root: Path = ROOT) -> dict[str, Any]:
    """Return the checkout's `commit` and whether it is `dirty` (changed or untracked files); None where git cannot tell."""
    commit = _output(["git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD"])
    changes = _output(["git", "-C", str(root), "status", "--porcelain"])
    known = commit is not None and changes is not None
    return {"commit": commit, "dirty": bool(changes)} if known else {"commit": None, "dirty": None}


def describe_hardware() -> dict[str, Any]:
    """Return the processor's name, the cores this process may use, the memory in bytes, and the NVIDIA GPUs."""
    return {
        "cpu": _cpu_name(),
        "cores": _usable_cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": _gpus(),
    }


def _cpu_name() -> str:
    """Return the processor's name, as Linux knows it or else as the platform does."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _usable_cores() -> int:
    """Return how many cores this process may run on, which in a container or under taskset is fewer than there are."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _gpus() -> list[dict[str, Any]]:
    """Return name, memory in bytes and driver of each GPU that nvidia-smi lists."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    rows = [line.rsplit(", ", 2) for line in (_output(query) or "").splitlines()]
    # A GPU cut into instances may report "[N/A]" for its memory.
    return [
        {"name": name, "memory_bytes": int(mebibytes) * MIB if mebibytes.isdigit() else None, "driver": driver}
        for name, mebibytes, driver in rows
    ]


def _output(command: list[str]) -> str | None:
    """Return what a command prints, None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

"""What a run was made with, kept beside its results so that numbers can be traced: `run.json`, and a training's fingerprint.

The environment is never recorded, and secrets are masked (`configs.runtime.redaction`). Imports no torch: the record is written
before anything slow begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
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
# Keys of a training's config that change none of its weights but by the order of sums, sections with all that is in them. A run
# may be resumed with others. Whatever is not here decides.
CHANGES_NO_WEIGHT = {
    # where and how often things are written, and how long is waited
    "output",
    "schedule.log_every_steps",
    "schedule.eval_every_steps",
    "schedule.checkpoint_every_steps",
    "schedule.keep_checkpoints",
    "schedule.trackers",
    "schedule.peak_tflops",
    "schedule.process_timeout_seconds",
    "schedule.evaluation_timeout_seconds",
    "schedule.resume",
    "schedule.resume_anyway",
    # their content is compared by its hash
    "data.train",
    "data.held_out",
    "data.cache",
    "init",
    "target.name",
    "target.revision",
    # memory and speed, and which machines and devices compute
    "loss.chunk_size",
    "schedule.activation_checkpointing",
    "target.states",
    "target.shards",
    "target.device",
    "target.device_map",
    "target.max_memory",
    "target.offload_folder",
    "target.forward",  # decoding alone runs another than transformers'
    "schedule.gradient_accumulation_steps",  # micro-batches a step are compared over all processes
    "sanity",  # leaves the head as it was
    # what is refused
    "target.images.max_bytes",
    "target.images.max_pixels",
    "target.audio.max_bytes",
    "target.audio.max_seconds",
}


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


def deciding_settings(config: Mapping[str, Any], contents: Mapping[str, str]) -> dict[str, Any]:
    """Return what decides a training's weights and which are kept: all of its config but `CHANGES_NO_WEIGHT`, and `contents`.

    The decoding of held-out prompts belongs to it: scores got in another way cannot be compared with the best so far. Options
    that are off (None) do not: one that the schema gains later leaves the hashes of today's runs as they are.
    """
    relevant = _deciding(config)
    if relevant.get("target", {}).get("tokens") == "text":  # what all targets had before there was such a key
        del relevant["target"]["tokens"]
    return relevant | {"contents": dict(contents)}


def changes_no_weight(key: str) -> bool:
    """Return whether a dotted key of a training's config is one of `CHANGES_NO_WEIGHT`, or in a section of them."""
    steps = key.split(".")
    return any(".".join(steps[: end + 1]) in CHANGES_NO_WEIGHT for end in range(len(steps)))


def _deciding(value: Any, above: str = "") -> Any:
    if isinstance(value, list):
        return [_deciding(each, f"{above}*.") for each in value]
    if not isinstance(value, dict):
        return value
    kept = {name: each for name, each in value.items() if each is not None and above + name not in CHANGES_NO_WEIGHT}
    return {name: _deciding(each, f"{above}{name}.") for name, each in kept.items()}


def training_fingerprint(config: Mapping[str, Any], contents: Mapping[str, str]) -> str:
    """Return a hash of `deciding_settings`."""
    return hashlib.sha256(json.dumps(deciding_settings(config, contents), sort_keys=True).encode()).hexdigest()


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

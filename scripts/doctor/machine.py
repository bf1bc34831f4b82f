"""The machine: processor, memory, the limits of its container, disks, accelerators. A broken torch is a finding, no failure."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from configs.runtime.errors import first_line
from configs.runtime.run_record import describe_hardware

CPUINFO = Path("/proc/cpuinfo")
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# As the kernel calls them, of x86 and of ARM.
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}  # widest first
SIDE = 64  # of the matrices that show that a device computes


def describe_machine() -> dict[str, Any]:
    """Return the processor, and memory in bytes, as far as this process may use them; `gpus` are those of nvidia-smi."""
    hardware, names = describe_hardware(), instructions()
    memory, cores = container_limits()
    least = hardware["memory_bytes"] if memory is None else min(memory, hardware["memory_bytes"])
    return {
        **hardware,
        "cores_limit": cores,
        "vectors": next((VECTORS[each] for each in VECTORS if each in names), None),
        "bfloat16": bool(names & BFLOAT16) if names else None,
        "memory_limit_bytes": memory if least == memory else None,
        "memory_free_bytes": min(least, psutil.virtual_memory().available),
    }


def instructions() -> set[str]:
    """Return the names of the processor's instruction sets; empty where the system does not say."""
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.is_file() else ""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def container_limits() -> tuple[int | None, float | None]:
    """Return the memory in bytes and the cores that this process's control groups grant it; None: all there are."""
    memory, cores = [], []
    for folder in _control_groups():
        memory += [int(each) for name in ("memory.max", "memory.limit_in_bytes") for each in _numbers(folder / name)[:1]]
        shares = _numbers(folder / "cpu.max") or [
            each for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us") for each in _numbers(folder / name)
        ]
        if len(shares) == 2:
            cores.append(shares[0] / shares[1])
    return min(memory, default=None), min(cores, default=None)


def _control_groups() -> Iterator[Path]:
    """Yield the folders of this process's groups and of those above them, of version 2 and of each controller of version 1."""
    lines = OWN_CGROUPS.read_text(encoding="utf-8").splitlines() if OWN_CGROUPS.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            top = CGROUPS / controller
            own = top / path.lstrip("/")
            yield from (each for each in (own, *own.parents) if each.is_relative_to(top))


def _numbers(path: Path) -> list[float]:
    """Return the numbers in a group's file; none where one of them is no limit."""
    try:
        return [float(each) for each in path.read_text(encoding="utf-8").split() if float(each) > 0]
    except (OSError, ValueError):  # not there, or "max"
        return []


def describe_disk(folder: Path) -> dict[str, Any]:
    """Return the bytes free on the disk where a folder is or will be, and whether it can be written."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return {
        "folder": str(folder),
        "free_bytes": shutil.disk_usage(there).free,
        "writable": there.is_dir() and os.access(there, os.W_OK | os.X_OK),
    }


def describe_accelerators() -> dict[str, Any]:
    """Return the devices that torch sees, and the error of one that does not compute; `error` where torch itself is broken."""
    try:
        import torch

        from heads.device import MISSING, default_device, free_memory, gpu_name

        def probe(device: torch.device) -> str | None:
            try:
                ones = torch.ones(SIDE, SIDE, device=device)
                total = float((ones @ ones).sum())
            except MISSING as error:
                return first_line(error)
            return None if total == SIDE**3 else f"a product of matrices is wrong: {total:g} in place of {SIDE**3}"

        kind = default_device().type
        count = 0 if kind == "cpu" else torch.accelerator.device_count()
        devices = [torch.device(kind, index) for index in range(count)]
        found = [
            {"name": gpu_name(each) or each.type, "free_bytes": free_memory(each), "error": probe(each)} for each in devices
        ]
        return {"error": probe(torch.device("cpu")), "devices": found}
    except Exception as error:  # whatever a broken installation raises
        return {"error": f"{type(error).__name__}: {first_line(error)}", "devices": []}

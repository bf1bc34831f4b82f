"""`draftsmith doctor`: what this machine has, and what is missing for what.

Asks no network and writes nothing. Ends with 0, or with 1 where even the embedded target cannot be
trained for: torch is broken, memory or disk too small.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from configs.runtime.command import DONE, GATE_FAILED, Parser, exit_code
from configs.runtime.errors import first_line
from configs.runtime.files import CHECKOUT, downloads_folder
from configs.runtime.redaction import mask_secrets
from configs.runtime.run_record import PACKAGES, describe_hardware, describe_versions
from configs.runtime.terminal import say

GIB, GB = 2**30, 10**9
# For the embedded target: training its draft LM peaked at 2.4 GiB, `make demo` left 0.4 GB beside 0.5 GB of the target.
LEAST_MEMORY, LEAST_DISK = 3 * GIB, 2 * GB
CPUINFO = Path("/proc/cpuinfo")
# As the kernel calls them, of x86 and of ARM.
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}


# Programs, packages and engines that some commands need: for what, and what brings them.
TOOLS = {
    "vllm": "draftsmith check; `pip install vllm`, or `make demo-serve`",
    "sglang": "serving its exports",
    "llama_cpp": "`--for gguf`; `sh scripts/setup_llama_cpp.sh`",
    "openvino": "`--for openvino`; `sh scripts/setup_engine.sh openvino`",
    "deepspeed": "configs/accelerate/zero*.yaml; `pip install 'draftsmith[cluster]'`",
    os.environ.get("CXX") or "g++": "a compiled loss, and on a GPU compiled attention",
    "git": "the commit in run.json",
    "sbatch": "`draftsmith run --on slurm`",
    "kubectl": "`draftsmith run --on k8s`",
    "docker": "scripts/docker",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0], epilog="It exits with 1 where nothing can be trained.")

    def run() -> int:
        parser.parse_args(argv)
        found = mask_secrets(examine())
        stops = list(stops_training(found))
        notes = [*(f"  ! {each}" for each in stops), *(f"  - {each}" for each in missing(found))]
        say("\n".join([*page(found), "missing, and for what", *notes]))
        return GATE_FAILED if stops else DONE

    return exit_code(run)


def examine() -> dict[str, Any]:
    """Return all that can be found out about this machine, as JSON values; sizes in bytes."""
    hub = describe_hub()
    folders = {"runs": "runs", "downloads": downloads_folder(), "hub": hub["cache"]}
    return {
        "machine": describe_machine(),
        "disks": {name: describe_disk(Path(folder)) for name, folder in folders.items() if folder is not None},
        "accelerators": describe_accelerators(),
        "versions": find_versions(),
        "tools": {name: find_tool(name) for name in TOOLS},
        "hub": hub,
    }


def page(values: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Yield the lines that a person reads: all that was found, bytes in GiB."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{name}"
            yield from page(value, indent + "  ")
        else:
            said = f"{value / GIB:.1f} GiB" if name.endswith("_bytes") else "-" if value in (None, []) else value
            yield f"{indent}{name.removesuffix('_bytes'):20}  {said}"


def stops_training(found: dict[str, Any]) -> Iterator[str]:
    """Yield what is missing that training cannot do without, even that of the embedded target."""
    if error := found["accelerators"]["error"]:
        yield f"torch does not work ({error}); `make setup` installs it"
    for name in found["versions"]["missing"]:
        yield f"{name} is not installed; `make setup` installs it"
    if (free := found["machine"]["memory_free_bytes"]) < LEAST_MEMORY:
        yield f"{free / GIB:.1f} GiB of memory are free: training for the embedded target takes {LEAST_MEMORY / GIB:.0f}"
    for name, disk in found["disks"].items():
        if name == "runs" and not disk["writable"]:
            yield f"{disk['folder']} cannot be written: work in another folder, or name an output elsewhere"
        elif name != "hub" and disk["free_bytes"] < LEAST_DISK:
            takes = f"the embedded target and a run take {LEAST_DISK / GB:.0f}"
            yield f"{disk['free_bytes'] / GB:.1f} GB are free on the disk of {disk['folder']}: {takes}"


def missing(found: dict[str, Any]) -> Iterator[str]:
    """Yield what else is missing, and for what."""
    machine, devices, versions, hub = found["machine"], found["accelerators"]["devices"], found["versions"], found["hub"]
    if machine["bfloat16"] is False:
        yield "the processor has no bfloat16 instructions: `--set target.dtype=float32` may be faster on it"
    for device in devices:
        if device["error"]:
            yield f"{device['name']} does not compute ({device['error']}): `target.device: cpu` leaves it alone"
    if machine["gpus"] and not devices:
        yield (
            f"nvidia-smi names {machine['gpus'][0]['name']}, which torch {versions['installed'].get('torch')} does not see: "
            "`ALLOW_CUDA=1 sh scripts/setup.sh` in a new .venv installs a build for it"
        )
    elif not devices:
        yield "no accelerator is here: `draftsmith plan` says how long training takes on one"
    if not hub["logged_in"]:
        yield "nobody is logged in to the Hub: gated targets and `draftsmith push` need it; `hf auth login`, or HF_TOKEN"
    if hub["offline"]:
        yield f"HF_HUB_OFFLINE is set: of targets on the Hub only those in {hub['cache']} can be used"
    if not found["disks"]["downloads"]["writable"]:
        yield "the folder of downloads cannot be written: name another for the embedded target in DRAFTSMITH_CACHE"
    yield from (f"{name} is not here, for {TOOLS[name]}" for name, place in found["tools"].items() if place is None)


def describe_machine() -> dict[str, Any]:
    """Return the processor, and memory in bytes; `gpus` are those of nvidia-smi."""
    names = instructions()
    found = {"memory_free_bytes": psutil.virtual_memory().available, "bfloat16": bool(names & BFLOAT16) if names else None}
    return describe_hardware() | found


def instructions() -> set[str]:
    """Return the names of the processor's instruction sets; empty where the system does not say."""
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.is_file() else ""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def describe_disk(folder: Path) -> dict[str, Any]:
    """Return the bytes free on the disk where a folder is or will be, and whether it can be written."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return {"folder": str(folder), "free_bytes": shutil.disk_usage(there).free, "writable": writable}


def describe_accelerators() -> dict[str, Any]:
    """Return the devices that torch sees, and the error of one that does not compute; `error` where torch itself is broken."""
    try:
        import torch

        from heads.device import MISSING, default_device, gpu_name

        def probe(device: torch.device) -> str | None:
            try:
                ones = torch.ones(64, 64, device=device)
                return None if float((ones @ ones).sum()) == 64**3 else "a product of matrices is wrong"
            except MISSING as error:
                return first_line(error)

        kind = default_device().type
        devices = [torch.device(kind, index) for index in range(0 if kind == "cpu" else torch.accelerator.device_count())]
        found = [{"name": gpu_name(each) or each.type, "error": probe(each)} for each in devices]
        return {"error": probe(torch.device("cpu")), "devices": found}
    except Exception as error:  # whatever a broken installation raises
        return {"error": f"{type(error).__name__}: {first_line(error)}", "devices": []}


def find_versions() -> dict[str, Any]:
    """Return the versions of what decides a result, and the packages that are missing."""
    versions = describe_versions()
    return {"installed": versions, "missing": [name for name in PACKAGES if name not in versions]}


def find_tool(name: str) -> str | None:
    """Return where a tool is: a program on the PATH, a package here, or an environment of its own; None where it is not."""
    own = [each / "venvs" / name for each in (downloads_folder(), CHECKOUT / ".cache")]
    package = [sys.prefix] if any(metadata.distributions(name=name)) else []
    return next(filter(None, (shutil.which(name), *package, *(str(each) for each in own if each.is_dir()))), None)


def describe_hub() -> dict[str, Any]:
    """Return whether there is a token for the Hub, and where the Hub and its cache are."""
    from huggingface_hub import constants, get_token

    found = {"endpoint": constants.ENDPOINT, "offline": constants.HF_HUB_OFFLINE, "cache": constants.HF_HUB_CACHE}
    return {"logged_in": get_token() is not None, **found}


if __name__ == "__main__":
    sys.exit(main())

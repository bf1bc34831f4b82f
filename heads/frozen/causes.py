"""Why the model in a folder could not be loaded, by the file at fault: loaders name the folder, or nothing at all.

Only looked for after a failure: a stand-in or a pickle beside what is loaded does no harm.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from configs.runtime.errors import first_line
from configs.runtime.files import IS_POINTER, LFS_POINTER

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
WITH_CODE = ("config.json", "tokenizer_config.json")  # may name Python files under `auto_map`


def cause_of(path: Path, error: BaseException) -> str:
    """Return why `path`, a model's folder or a file of it, could not be loaded; the error's words where no file is at fault."""
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    for file in files:
        if file.is_file() and (fault := _fault_of(file)) is not None:
            return f"{file} {fault}"
    if "trust_remote_code" in str(error):
        named = [name for name in WITH_CODE if (path / name).is_file() and b"auto_map" in (path / name).read_bytes()]
        return (
            f"{path / (named or WITH_CODE)[0]} names code of its own (auto_map), which runs for a target alone: read it, then "
            "set target.trust_remote_code to true"
        )
    pickles = sorted(each for pattern in PICKLES for each in path.glob(pattern))
    if pickles and not any(path.glob("*.safetensors")):
        return (
            f"{pickles[0]} is a pickle, which may run code when it is read, and there are no safetensors: load the model in "
            "transformers where you trust it, save it by save_pretrained, and name that folder"
        )
    return first_line(error) if path.is_dir() else f"{path} cannot be read: {first_line(error)}"


def _fault_of(path: Path) -> str | None:
    """Return what is wrong with a file, as a phrase that follows its name; None: nothing that can be seen."""
    try:
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER.encode():
                return IS_POINTER
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                return None
        if path.suffix == ".json":
            json.loads(path.read_bytes())
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        return f"cannot be read: {first_line(error)}; it may be cut off: fetch it again"
    return None

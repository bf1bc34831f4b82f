"""The files of a checkpoint: their tensors by name, and files linked rather than copied.

Tensors of safetensors files are maps of the file: they take memory when they are used.
A link shares its bytes with the file it was made from: `break_links` before changing one.
"""

from __future__ import annotations

import os
import pickle
import shutil
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import read_json
from configs.schema.commands.release import TORCH_FILE

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_SHOWN = 12  # names repeated in an error message
# What transformers raises for a file that is missing, damaged, contradictory, or needs a package that is not installed.
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, ImportError, AssertionError, SafetensorError, StrictDataclassError)

Weights = dict[str, Tensor]


def read_weights(folder: Path) -> Weights:
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        paths = sorted({folder / file for file in files_by_key(folder).values()})
        return {name: value for path in paths for name, value in read_tensors(path).items()}
    if (folder / TORCH_FILE).is_file():
        return _torch_file(folder / TORCH_FILE)
    raise InputError(f"{folder} holds none of {SINGLE_FILE}, {INDEX_FILE}, {TORCH_FILE}")


def read_tensors(path: Path) -> Weights:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a safetensors file; one tensor under several names is written as often."""
    seen: set[int] = set()
    values = {}
    for name, value in weights.items():
        values[name] = value.clone(memory_format=torch.contiguous_format) if value.data_ptr() in seen else value.contiguous()
        seen.add(value.data_ptr())
    save_file(values, path, metadata={"format": "pt"})


def files_by_key(folder: Path) -> dict[str, str]:
    """Return the file of every tensor of a safetensors checkpoint."""
    if (folder / INDEX_FILE).is_file():
        files = indexed_files(folder)
        absent = {file for file in files.values() if Path(file).name != file or not (folder / file).is_file()}
        if absent:
            raise InputError(f"{folder / INDEX_FILE} names files that are not in the folder: {listed(absent)}")
        return files
    if not (folder / SINGLE_FILE).is_file():
        raise InputError(f"{folder} holds neither {INDEX_FILE} nor {SINGLE_FILE}, where a checkpoint's MTP weights would be")
    try:
        with safe_open(folder / SINGLE_FILE, "pt") as file:
            return dict.fromkeys(file.keys(), SINGLE_FILE)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / SINGLE_FILE} cannot be read: {first_line(error)}") from error


def indexed_files(folder: Path) -> dict[str, str]:
    """Return the file of every tensor that a checkpoint's index names, there or not."""
    index = read_json(folder / INDEX_FILE, "index of the checkpoint")
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise InputError(f"{folder / INDEX_FILE} has no weight_map")
    return {key: str(file) for key, file in index["weight_map"].items()}


def listed(keys: Collection[str]) -> str:
    """Return names for an error message, the first dozen and how many more there are."""
    names = sorted(keys)
    return ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")


def link_or_copy(path: str | Path, to: str | Path) -> None:
    """Link a file where the file system allows, copy it elsewhere; a symbolic link stands for what it leads to."""
    path = Path(path).resolve()
    try:
        os.link(path, to)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(path, to)


def break_links(path: Path) -> None:
    """Give a file its own bytes, to which one may write, where other names link to them."""
    if path.stat().st_nlink > 1:
        copy = path.with_name(f".{path.name}.own")
        shutil.copy2(path, copy)
        copy.replace(path)
    path.chmod(path.stat().st_mode | stat.S_IWUSR)


def _torch_file(path: Path) -> Weights:
    try:
        values: Weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} is no file of torch's with tensors only; what else such a file names is never run. Ask its author for "
            "safetensors"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise InputError(f"{path} holds something else than tensors by name")
    return values

"""The files of a checkpoint: their tensors, read and written one at a time, and files linked rather than copied.

An export needs memory for one tensor at most, whatever the model's size; safetensors' own `save_file` wants all in memory.
A link shares its bytes with the file it was made from: `break_links` before changing one.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import read_json
from configs.schema.commands.release import TORCH_FILES

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_SHOWN = 12  # names repeated in an error message
HEAD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
# What transformers raises for a file that is missing, damaged, contradictory, or needs a package that is not installed.
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, ImportError, AssertionError, SafetensorError, StrictDataclassError)
NAMES = {  # dtypes by safetensors' names
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
PACKED_NAMES = {  # of numbers that mean nothing without the scales beside them
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor that is read when it is needed; `load` returns values of this shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    def __getitem__(self, index: Any) -> Tensor:
        """Read it, as transformers does a tensor of a state dict."""
        return self.load()[index]

    def cast(self, dtype: torch.dtype | None) -> LazyTensor:
        """Return the same values in another floating dtype; None, and tensors of integers or bools, change nothing."""
        if dtype is None or dtype == self.dtype or not self.dtype.is_floating_point:
            return self
        return replace(self, dtype=dtype, load=lambda: self.load().to(dtype))

    def halves_swapped(self) -> LazyTensor:
        """Return a matrix with the two halves of its columns exchanged."""
        return replace(self, load=lambda: self.load().roll(self.shape[1] // 2, 1))

    def rows(self, ids_W: Tensor) -> LazyTensor:
        return replace(self, shape=(len(ids_W), *self.shape[1:]), load=lambda: self.load()[ids_W])

    def reshaped(self, shape: tuple[int, ...]) -> LazyTensor:
        return replace(self, shape=shape, load=lambda: self.load().reshape(shape))

    def full_vocabulary_head(self, ids_W: Tensor, num_rows: int) -> LazyTensor:
        """Return an output head of W tokens, `[W, D]`, as one of all tokens with the same argmax, `[num_rows, D]`.

        Every other token gets the mean of these rows, whose logit is never above the largest, as that of zeros could be.
        """

        def load() -> Tensor:
            rows_WD = self.load()
            whole_VD = rows_WD.double().mean(0).to(rows_WD.dtype).repeat(num_rows, 1)
            whole_VD[ids_W] = rows_WD
            return whole_VD

        return replace(self, shape=(num_rows, *self.shape[1:]), load=load)


Weights = dict[str, LazyTensor]


def constant(value: Tensor) -> LazyTensor:
    """Return a tensor that is in memory."""
    return LazyTensor(shape=tuple(value.shape), dtype=value.dtype, load=lambda: value)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> LazyTensor:
    return LazyTensor(shape=shape, dtype=dtype, load=lambda: torch.zeros(shape, dtype=dtype))


def read_weights(folder: Path, *, packed: bool = False) -> Weights:
    """Return all tensors of a checkpoint's folder by name; with `packed` those of `PACKED_NAMES` too."""
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        paths = sorted({folder / file for file in files_by_key(folder).values()})
        return {name: stored for path in paths for name, stored in _safetensors(path, packed=packed).items()}
    for file in (*HEAD_FILES, TORCH_FILES[0]):
        if (folder / file).is_file():
            return _torch_file(folder / file) if file in TORCH_FILES else _safetensors(folder / file)
    raise InputError(f"{folder} holds none of {', '.join((SINGLE_FILE, INDEX_FILE, *HEAD_FILES, TORCH_FILES[0]))}")


def write_weights(path: Path, weights: Mapping[str, LazyTensor]) -> None:
    """Write a safetensors file, reading one tensor after another."""
    spelled = {dtype: name for name, dtype in NAMES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # By falling size of a number, as safetensors does, so that every tensor begins at a multiple of it.
    order = sorted(weights, key=lambda name: (-weights[name].dtype.itemsize, name))
    for name in order:
        stored = weights[name]
        end = offset + math.prod(stored.shape) * stored.dtype.itemsize
        header[name] = {"dtype": spelled[stored.dtype], "shape": list(stored.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            stored, value = weights[name], weights[name].load()
            if value.dtype != stored.dtype or tuple(value.shape) != stored.shape:
                raise RuntimeError(
                    f"{name} was declared as {stored.dtype} {stored.shape}, got {value.dtype} {tuple(value.shape)}"
                )
            file.write(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


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


def _safetensors(path: Path, *, packed: bool = False) -> Weights:
    names = NAMES | PACKED_NAMES if packed else NAMES
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in list(file.keys())}
            described = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    unknown = sorted({dtype for dtype, _ in described.values()} - names.keys())
    if unknown:
        raise InputError(f"{path} holds numbers of type {', '.join(unknown)}; known are {', '.join(names)}")
    return {
        name: LazyTensor(shape=shape, dtype=names[dtype], load=partial(_read, path, name))
        for name, (dtype, shape) in described.items()
    }


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        value: Tensor = file.get_tensor(name)
    return value


def _torch_file(path: Path) -> Weights:
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} is no file of torch's with tensors only; what else such a file names is never run. Ask its author for "
            "safetensors"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise InputError(f"{path} holds something else than tensors by name")
    return {name: constant(value) for name, value in values.items()}

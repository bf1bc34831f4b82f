"""The MTP weights that some checkpoints hold and transformers drops on loading: how they are named, read and replaced.

"Stitching" writes another folder: files without MTP tensors are linked to the target's, and the others written again with new
values, so that whatever is not an MTP tensor keeps every bit, dtype and shard.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from safetensors import safe_open
from torch import Tensor

from configs.runtime.errors import InputError
from configs.runtime.files import read_json
from heads.frozen.weights import files_by_key, link_or_copy, listed, quantization_of, read_tensors, write_weights

PARTS = ("eh_proj", "enorm", "hnorm", "post_norm", "mtp_block")  # of `heads.families.mtp.MtpLayer`


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How a family of checkpoints names a module's tensors; `{k}` is its number, `{n}` the same counted on from the blocks."""

    families: str
    prefix: str
    parts: tuple[str, str, str, str, str]  # their names of our `PARTS`, after the prefix
    hidden_first: bool = False  # the projection reads [state ; embedding]
    reads: Literal["post_norm", "pre_norm"] = "post_norm"  # the target's last state that they were trained on, and engines give
    borrowed: tuple[str, ...] = ()  # copies of what is the target's (embedding, head), neither read nor written

    def pattern(self, part: str) -> str:
        return f"{self.prefix}.{self.parts[PARTS.index(part)]}".removesuffix(".")


NAMINGS = (
    Naming(
        families="Qwen3-Next, Qwen3.5",
        prefix="mtp",
        parts=("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0"),
    ),
    Naming(
        families="MiMo",
        prefix="model.mtp_layers.{k}",
        parts=("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", ""),
        hidden_first=True,
        reads="pre_norm",
    ),
    Naming(
        families="DeepSeek-V3, GLM-4-MoE",
        prefix="model.layers.{n}",
        parts=("eh_proj", "enorm", "hnorm", "shared_head.norm", ""),
        borrowed=("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A checkpoint's tensor, the part of ours that it is, and whether its two halves of columns are the other way round."""

    key: str
    index: tuple[int | slice, ...] = ()
    swapped: bool = False

    def turned(self, value: Tensor) -> Tensor:
        return value.roll(value.shape[1] // 2, 1) if self.swapped else value


class NativeMtp:
    """The MTP tensors in a checkpoint's folder; an InputError where it holds none of a known naming, or several modules."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = files_by_key(folder)
        self._num_blocks = _num_blocks(folder)
        found = [naming for naming in NAMINGS if self._has_module(naming, 0)]
        if not found:
            known = "; ".join(f"{each.families}: {each.pattern('eh_proj')}.weight" for each in NAMINGS)
            raise InputError(f"{folder} holds no MTP weights that draftsmith knows ({known})")
        self.naming = found[0]
        if "{" in self.naming.prefix and self._has_module(self.naming, 1):
            raise InputError(f"{folder} holds an MTP module for each of several depths, and heads here have one for all depths")

    def read(self, like: Mapping[str, Tensor], *, without: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the checkpoint's values of our tensors, in the checkpoint's dtype.

        `like` are ours by name, `layers.0.{part}...` as in `heads.families.mtp.Mtp`, of which only shapes are looked at;
        `without`: see `places`.
        """
        values = {}
        for name, pieces in self.places(like, without=without).items():
            parts = [piece.turned(self._value(piece.key)) for piece in pieces]
            values[name] = torch.empty(like[name].shape, dtype=parts[0].dtype)
            for piece, part in zip(pieces, parts, strict=True):
                values[name][piece.index] = part
        return values

    def stitch_into(self, folder: Path, values: Mapping[str, Tensor], places: Mapping[str, list[TensorPart]]) -> None:
        """Fill an empty folder with a copy of this one in which exactly the MTP tensors are replaced.

        A tensor that is the checkpoint's own, rounded to another dtype, leaves the checkpoint's as it was.
        """
        shutil.copytree(self.folder, folder, dirs_exist_ok=True, copy_function=link_or_copy)
        changed: dict[str, dict[str, Tensor]] = {}
        for name, pieces in places.items():
            for piece in pieces:
                new, old = piece.turned(values[name][piece.index]), self._value(piece.key)
                if not torch.equal(old.to(new.dtype), new):
                    changed.setdefault(self._files[piece.key], {})[piece.key] = new.to(old.dtype)
        for file, tensors in changed.items():
            (folder / file).unlink()  # a link to the target's
            write_weights(folder / file, read_tensors(self.folder / file) | tensors)

    def places(self, ours: Mapping[str, Tensor], *, without: Collection[str] = ()) -> dict[str, list[TensorPart]]:
        """Return where each of our tensors lies, after checking that all and, but for `without`, nothing else is there."""
        places = {name: self._pieces(name, tuple(value.shape)) for name, value in ours.items()}
        wanted = {piece.key for pieces in places.values() for piece in pieces}
        prefix = self._spelled(self.naming.prefix) + "."
        there = {key for key in self._files if key.startswith(prefix) and not key.endswith(self.naming.borrowed)}
        quantised = " (it is quantised, and MTP modules are read and written unquantised only)"
        why = "" if quantization_of(self.folder) is None else quantised
        for words, keys in (
            ("lacks", wanted - self._files.keys()),
            ("has no place in the head for", there - wanted - set(without)),
        ):
            if keys:
                raise InputError(
                    f"{self.folder}: its MTP naming is that of {self.naming.families}, but it {words} {listed(keys)}{why}"
                )
        for name, pieces in places.items():
            for piece in pieces:
                with safe_open(self.folder / self._files[piece.key], "pt") as file:
                    theirs = list(file.get_slice(piece.key).get_shape())
                own = list(ours[name][piece.index].shape)
                if own != theirs:
                    raise InputError(f"{self.folder}: {piece.key} has shape {theirs}, the head's {name} asks for {own}")
        return places

    def _pieces(self, name: str, shape: tuple[int, ...]) -> list[TensorPart]:
        _, _, part, rest = name.split(".", 3)
        key = f"{self._spelled(self.naming.pattern(part))}.{rest}"
        if part == "eh_proj":
            return [TensorPart(key=key, swapped=self.naming.hidden_first)]
        stem, _, last = key.rpartition(".")
        if key in self._files or not stem.endswith(".experts"):
            return [TensorPart(key=key)]
        if last == "down_proj":
            return [TensorPart(key=f"{stem}.{expert}.down_proj.weight", index=(expert,)) for expert in range(shape[0])]
        half = shape[1] // 2
        return [
            TensorPart(key=f"{stem}.{expert}.{half_name}.weight", index=(expert, rows))
            for expert in range(shape[0])
            for half_name, rows in (("gate_proj", slice(half)), ("up_proj", slice(half, None)))
        ]

    def _has_module(self, naming: Naming, number: int) -> bool:
        return self._spelled(f"{naming.pattern('eh_proj')}.weight", number) in self._files

    def _spelled(self, pattern: str, number: int = 0) -> str:
        return pattern.format(k=number, n=self._num_blocks + number)

    def _value(self, key: str) -> Tensor:
        with safe_open(self.folder / self._files[key], "pt") as file:
            return cast(Tensor, file.get_tensor(key))


def _num_blocks(folder: Path) -> int:
    config = read_json(folder / "config.json", "config of the target")
    text = config.get("text_config", config) if isinstance(config, dict) else {}
    number = text.get("num_hidden_layers")
    if not isinstance(number, int):
        raise InputError(f"{folder / 'config.json'}: expected num_hidden_layers to be a whole number, got {number!r}")
    return number

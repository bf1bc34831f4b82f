"""A target cache on disk: the tensors kept of each position, the shards that hold them, and the manifest.

A cache is a folder: `manifest.json`, `shard-00000.safetensors`, ... Row j of a conversation is its position j. A shard has the
rows of some conversations, one after the other, in these tensors:

    hidden       [N, E]          the target's final, normed hidden state; its head computes the exact logits from it
    h_2, ...     [N, E]          the state of each tap (`heads.frozen.hidden_states` has the convention)
    h_2_scale    [N], float32    of taps in 8 bits: what a row is multiplied by; `hidden` is then bfloat16
    log_sum      [N], float32    log of the sum of exp(logits) over all rows of the target's head
    top1         [N], int32      the most likely token

Its metadata say which job made it, so that no shard of a cache that was remade passes, and a CRC-32 of all its tensors in this
order. Which conversation lies where follows from the data file alone (`place_rows`).
N rows, E width, C conversations.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, ValidationError

from configs.runtime.errors import InputError
from configs.runtime.files import read_object
from configs.schema.base import NonNegativeInt, PositiveInt, Settings
from configs.schema.data import CacheDtype
from distill.dataset.batches import ConversationDataset
from heads.metadata import HiddenStates

MANIFEST = "manifest.json"
SHARD = "shard-{number:05d}.safetensors"
JOB = "job.json"  # what the shards beside it are made of
MADE_OF = "job and checksum"  # metadata of a shard; a single entry, since safetensors writes several in any order
FP8 = "float8_e4m3fn"
REMAKE = "make the cache again with scripts/cache.py"
CONVENTION = str(HiddenStates.model_fields["convention"].default)  # what a tap's number means, here and in artifacts

# Files that a run may leave behind (scratch files of a killed one among them) and may delete.
DISPOSABLE = re.compile(r"manifest\.json|job\.json|shard-\d+\.safetensors|\.shard-\d.*|\.(manifest|job|run)\.json\..*")

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RowLayout(Settings):
    """The tensors that are kept of each row."""

    dtype: CacheDtype  # of hidden states; in 8 bits only taps are kept
    width: PositiveInt  # E
    taps: list[NonNegativeInt]  # states kept beside the final one
    convention: str = CONVENTION  # what the numbers in `taps` mean
    target_dtype: str  # of the target whose logits were normalised

    @property
    def scaled(self) -> bool:
        """Whether taps are kept in 8 bits, each row with a scale."""
        return self.dtype == FP8

    @property
    def bytes_per_row(self) -> int:
        """Bytes that a row takes, the file's header apart."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors(1).values())

    def tensors(self, *rows: int) -> dict[str, tuple[list[int], torch.dtype]]:
        """Return shape and dtype of each tensor, by name, for rows `[*rows]`."""
        states, dtype = [*rows, self.width], getattr(torch, self.dtype)
        kept = {"hidden": (states, torch.bfloat16 if self.scaled else dtype)}
        kept |= {tap_name(tap): (states, dtype) for tap in self.taps}
        kept |= {scale_name(tap): ([*rows], torch.float32) for tap in self.taps if self.scaled}
        return kept | {"log_sum": ([*rows], torch.float32), "top1": ([*rows], torch.int32)}


def tap_name(tap: int) -> str:
    return f"h_{tap}"


def scale_name(tap: int) -> str:
    """Return the name of the tensor by which the rows of a tap in 8 bits are multiplied."""
    return f"h_{tap}_scale"


class CacheManifest(Settings):
    """The content of `manifest.json`."""

    format_version: Literal[1] = 1
    layout: RowLayout
    target: dict[str, str | None]  # heads.frozen.identity.TargetIdentity
    data_file: str
    data_sha256: Sha256
    max_length: PositiveInt  # tokens that conversations were cut at
    rows_per_shard: PositiveInt  # at most, but for a single longer conversation
    job: Sha256  # a hash of all that decides the shards' bytes


class Places(NamedTuple):
    """Where each conversation's rows lie, by its place in the data file; int64 `[C]`. One without an answer has length 0."""

    shard_C: np.ndarray
    offset_C: np.ndarray
    length_C: np.ndarray

    @property
    def rows_of_shards(self) -> list[int]:
        """How many rows each shard has."""
        return [int(rows) for rows in np.bincount(self.shard_C[self.length_C > 0], self.length_C[self.length_C > 0])]


def place_rows(dataset: ConversationDataset, rows_per_shard: int) -> Places:
    """Put conversations into shards in the order of their file, each into one that has room for it, or into one of its own."""
    places = Places(*np.zeros((3, len(dataset.conversations)), np.int64))
    shard, used = 0, 0
    for number, length in zip(dataset.numbers.tolist(), dataset.lengths.tolist(), strict=True):
        if used and used + length > rows_per_shard:
            shard, used = shard + 1, 0
        places.shard_C[number], places.offset_C[number], places.length_C[number] = shard, used, length
        used += length
    return places


def read_manifest(folder: Path) -> CacheManifest:
    """Return the manifest of a cache; `InputError` where there is none, or no whole one."""
    path, where = folder / MANIFEST, f"target cache {folder / MANIFEST}"
    if not path.is_file():
        cut_off = f"target cache {folder} has no {MANIFEST}, so making it was cut off; run scripts/cache.py again"
        raise InputError(cut_off if folder.is_dir() and any(folder.iterdir()) else f"target cache not found: {folder}")
    try:
        return CacheManifest.model_validate(read_object(path, "target cache"))
    except ValidationError as error:
        finding = error.errors()[0]
        key = ".".join(str(part) for part in finding["loc"])
        raise InputError(f"{where}: {key or 'rows'}: {finding['msg']}; {REMAKE}") from error

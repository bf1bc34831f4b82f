"""A target cache on disk, and its reader: the target's outputs for a batch, from shards instead of a forward.

A cache is a folder: `manifest.json`, `shard-00000.safetensors`, ... Row j of a conversation is its position j. A shard has the
rows of some conversations, one after the other, in these tensors:

    hidden       [N, E]          the target's final, normed hidden state; its head computes the exact logits from it
    h_2, ...     [N, E]          the state of each tap (`heads.frozen.hidden_states` has the convention)
    log_sum      [N], float32    log of the sum of exp(logits) over all rows of the target's head
    top1         [N], int32      the most likely token

Its metadata say which job made it, so that no shard of a cache that was remade passes, and a CRC-32 of all its tensors in this
order. Which conversation lies where follows from the data file alone (`place_rows`). A cache is opened for one data file and
one target, and refused for any other; conversations are known by their number in the file, so rows that a policy rewrites
cannot be served. A batch in host memory gets its rows there, so that a loader's workers may read them; no file or map is kept
open between two batches. N rows, C conversations, B batch, T positions, P = B * T flat places, E width of the target.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.runtime.errors import ConfigError, InputError, first_finding
from configs.runtime.files import inside, read_object
from configs.schema.base import Dtype, NonNegativeInt, PositiveInt, Settings
from distill.dataset.batches import ConversationDataset, documents_of
from distill.dataset.conversations import open_conversations
from heads.device import upload
from heads.frozen.hidden_states import TargetStates
from heads.frozen.identity import TargetIdentity, remembered_sha256
from heads.frozen.loading import Target
from heads.metadata import HiddenStates
from heads.modules.interface import Batch, Normalisers

MANIFEST = "manifest.json"
SHARD = "shard-{number:05d}.safetensors"
MADE_OF = "job and checksum"  # metadata of a shard; a single entry, since safetensors writes several in any order
REMAKE = "make the cache again with scripts/cache.py"
CONVENTION = str(HiddenStates.model_fields["convention"].default)  # what a tap's number means, here and in artifacts

# Files that a run may leave behind (scratch files of a killed one among them) and may delete.
DISPOSABLE = re.compile(r"manifest\.json|shard-\d+\.safetensors|\.shard-\d.*|\.(manifest|run)\.json\..*")

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RowLayout(Settings):
    """The tensors that are kept of each row."""

    dtype: Dtype  # of hidden states
    width: PositiveInt  # E
    taps: list[NonNegativeInt]  # states kept beside the final one
    convention: str = CONVENTION  # what the numbers in `taps` mean
    target_dtype: str  # of the target whose logits were normalised

    @property
    def bytes_per_row(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors(1).values())

    def tensors(self, *rows: int) -> dict[str, tuple[list[int], torch.dtype]]:
        """Return shape and dtype of each tensor, by name, for rows `[*rows]`."""
        states, dtype = [*rows, self.width], getattr(torch, self.dtype)
        kept = dict.fromkeys(("hidden", *map(tap_name, self.taps)), (states, dtype))
        return kept | {"log_sum": ([*rows], torch.float32), "top1": ([*rows], torch.int32)}


def tap_name(tap: int) -> str:
    return f"h_{tap}"


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
    path = folder / MANIFEST
    if not path.is_file():
        cut_off = f"target cache {folder} has no {MANIFEST}, so making it was cut off; run scripts/cache.py again"
        raise InputError(cut_off if folder.is_dir() and any(folder.iterdir()) else f"target cache not found: {folder}")
    try:
        return CacheManifest.model_validate(read_object(path, "target cache"))
    except ValidationError as error:
        raise InputError(f"target cache {path}: {first_finding(error, 'rows')}; {REMAKE}") from error


class TargetCache:
    """The target's outputs for the conversations of one data file. Made by `open_cache`; `dtype` is that of returned states.

    Every method that reads rows raises `InputError` where a shard is missing or damaged: its checksum is compared when it is
    first opened.
    """

    def __init__(self, folder: Path, manifest: CacheManifest, places: Places, dtype: torch.dtype) -> None:
        self.folder, self.manifest, self.places, self.dtype = folder, manifest, places, dtype
        self._num_rows = places.rows_of_shards
        self._checked: set[int] = set()  # shards whose checksum was compared

    def states(self, batch: Batch, taps: Sequence[int] = ()) -> TargetStates:
        """Return the target's states at every position, on the batch's device and in the target's dtype; 0 on padding.

        `taps` are some of the cache's (`check_keeps`), in the order in which they are wanted.
        """
        kept, device = self._rows(batch, ["hidden", *map(tap_name, taps)]), batch.input_ids_BT.device
        final_BTE, *taps_ABTE = (upload(states_BTE.to(self.dtype), device) for states_BTE in kept.values())
        return TargetStates(final_BTE=final_BTE, taps_ABTE=tuple(taps_ABTE))

    def normalisers(self, batch: Batch) -> Normalisers:
        """Return the normalisers of the target's logits at every position of a batch, on its device; 0 on padding."""
        kept, device = self._rows(batch, ["log_sum", "top1"]), batch.input_ids_BT.device
        return Normalisers(
            log_sum_P=upload(kept["log_sum"].flatten(), device), top1_P=upload(kept["top1"].flatten().long(), device)
        )

    def check_keeps(self, taps: Sequence[int]) -> None:
        """Raise `InputError` where the cache does not keep the states that a head reads, or was made in another dtype."""
        layout = self.manifest.layout
        if missing := [tap for tap in taps if tap not in layout.taps]:
            kept = f"keeps taps {layout.taps}, and the head reads {list(taps)}: {missing} are missing"
            raise InputError(f"target cache {self.folder} {kept}; make the cache with these taps, or change head.taps")
        if layout.target_dtype != (here := str(self.dtype).removeprefix("torch.")):
            made = f"target cache {self.folder} was made with target.dtype {layout.target_dtype}"
            raise InputError(f"{made}, and the target is in {here} here: their logits differ; set target.dtype, or {REMAKE}")

    def _rows(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        """Return what is kept of a batch, `[B, T, ...]` by the names of tensors, in host memory; 0 on padding."""
        host, layout = batch.on_host, self.manifest.layout.tensors(*batch.input_ids_BT.shape)
        found = {name: torch.zeros(layout[name][0], dtype=layout[name][1]) for name in names}
        by_shard = sorted((int(self.places.shard_C[each.conversation]), each) for each in documents_of(host))
        for shard, documents in groupby(by_shard, lambda each: each[0]):
            with self._shard(shard) as file:
                for _, (row, start, end, number) in documents:
                    if end - start > self.places.length_C[number]:
                        raise ValueError(f"conversation {number} has {self.places.length_C[number]} rows, not {end - start}")
                    first = int(self.places.offset_C[number])
                    for name, values in found.items():
                        values[row, start:end] = file.get_slice(name)[first : first + end - start]
        return found

    @contextmanager
    def _shard(self, number: int) -> Iterator[Any]:
        path = inside(self.folder, SHARD.format(number=number), f"target cache {self.folder}")
        try:
            with safe_open(path, framework="pt") as file:
                if number not in self._checked:
                    self._check(file, number, path)
                    self._checked.add(number)
                yield file
        except FileNotFoundError as error:
            raise InputError(f"target cache shard {path} is missing; {REMAKE}") from error
        except (SafetensorError, OSError) as error:
            raise _damaged(path, "it is no safetensors file") from error

    def _check(self, file: Any, number: int, path: Path) -> None:
        job, checksum = made_of(file)
        if job != self.manifest.job:
            raise _damaged(path, "it is of another cache")
        tensors = (file.get_tensor(name) for name in self.manifest.layout.tensors(0))
        if checksum != checksum_of(tensors) or file.get_slice("top1").get_shape() != [self._num_rows[number]]:
            raise _damaged(path, "its rows are not those written")


def open_cache(folder: str | Path, data_file: Path, target: Target) -> TargetCache:
    """Open a cache for a data file and a target; any other data or target are an `InputError`."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    writer = TargetIdentity.from_dict(dict(manifest.target), str(folder / MANIFEST))
    if differences := writer.differences(target.identity):
        differ = f"which differs from target {target.identity.name} in {' and '.join(differences)}"
        raise InputError(f"target cache {folder} was made by {writer.name}, {differ}; {REMAKE}")
    if remembered_sha256(data_file) != manifest.data_sha256:
        raise InputError(f"target cache {folder} was made of {manifest.data_file}, and {data_file} is not that file; {REMAKE}")
    dataset = ConversationDataset(open_conversations(data_file), manifest.max_length)
    return TargetCache(folder, manifest, place_rows(dataset, manifest.rows_per_shard), target.model.dtype)


def check_fits(cache: TargetCache, dataset: ConversationDataset) -> None:
    """Refuse a dataset that the cache cannot serve; for the taps of a head see `TargetCache.check_keeps`."""
    if bool((dataset.lengths > cache.places.length_C[dataset.numbers]).any()):
        longest = f"{cache.manifest.max_length}, which target cache {cache.folder} was made with"
        raise ConfigError(f"data.max_length: expected at most {longest}, got {dataset.max_length}")


def made_of(shard: Any) -> tuple[str, str]:
    """Return the job that made an open shard, and the checksum of its tensors."""
    job, _, checksum = str((shard.metadata() or {}).get(MADE_OF)).partition(" ")
    return job, checksum


def checksum_of(tensors: Iterable[Tensor]) -> str:
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _damaged(path: Path, how: str) -> InputError:
    return InputError(f"target cache shard {path} is damaged: {how}; delete it and run scripts/cache.py again")

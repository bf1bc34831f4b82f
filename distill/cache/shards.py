"""Reading rows out of shards: the bytes of each conversation, and no file or map kept open between two batches.

A shard's header is read once and kept, of the `MOST_HEADERS` shards used last; rows are then read by their place in the file,
from a store all those of a batch at once. Each conversation is compared with its checksum whenever it is read, by the thread
that reads it. Shards of format version 1 are hashed whole, when first used.
N rows, C conversations of a shard.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.runtime.errors import InputError
from distill.cache.format import CHECKSUMS, JOB_OF_SHARD, OFFSETS, REMAKE, SHARD, FirstManifest, Manifest
from distill.cache.storage import Folder, Span

MOST_HEADERS = 1024
FIRST_READ = 2**16  # bytes, in which the header lies, mostly with the checksums
MAX_HEADER = 2**24
NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
}


class Wanted(NamedTuple):
    """Rows of a conversation: the first `length` of the `kept` ones that lie from `offset` on."""

    shard: int
    offset: int
    kept: int
    length: int


class _Header(NamedTuple):
    """What is known of a shard without its rows."""

    starts: dict[str, int]  # byte at which each tensor begins
    checksums: dict[int, list[int]]  # by the first row of a conversation: of its bytes in each tensor; empty in version 1


class Shards:
    """The shards of a cache; every method raises `InputError` where one is missing, damaged, or was changed."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._headers = OrderedDict[int, _Header]()
        self._hashed: set[int] = set()  # of version 1
        self._tensors = list(manifest.layout.tensors(0))

    def rows(self, wanted: Sequence[Wanted], names: Sequence[str], *, pinned: bool = False) -> dict[str, Tensor]:
        """Return rows, one conversation's after the other's, by name; `pinned`: in page-locked memory."""
        headers = self._headers_of(sorted({each.shard for each in wanted}))
        layout, whole = self._manifest.layout.tensors(1), not isinstance(self._manifest, FirstManifest)
        spans, num_rows = [], sum(each.length for each in wanted)
        sizes = {name: torch.empty(shape, dtype=dtype).nbytes for name, (shape, dtype) in layout.items()}
        for name in names:
            for each in wanted:
                start = headers[each.shard].starts[name] + each.offset * sizes[name]
                # A checksum is that of all rows.
                spans.append(Span(self._file(each.shard), start, start + (each.kept if whole else each.length) * sizes[name]))
        parts = iter(self._read(spans))
        found: dict[str, Tensor] = {}
        for name in names:
            shape, dtype = layout[name]
            found[name] = torch.empty(num_rows, *shape[1:], dtype=dtype, pin_memory=pinned)
            memory, at = found[name].flatten().view(torch.uint8).numpy(), 0
            for each in wanted:
                part, size = next(parts), each.length * sizes[name]
                if whole:
                    self._check(each, name, part, headers[each.shard])
                memory[at : at + size] = np.frombuffer(part, np.uint8, size)
                at += size
        return found

    def _check(self, wanted: Wanted, name: str, content: bytes, header: _Header) -> None:
        sums = header.checksums.get(wanted.offset)
        if sums is None or zlib.crc32(content) != sums[self._tensors.index(name)]:
            raise self._damaged(
                wanted.shard, f"its rows {wanted.offset} to {wanted.offset + wanted.kept} are not those written"
            )

    def _headers_of(self, numbers: Sequence[int]) -> dict[int, _Header]:
        """Return the headers of shards, reading those that are not known."""
        new = [number for number in numbers if number not in self._headers]
        if isinstance(self._manifest, FirstManifest):
            for number in set(new) - self._hashed:
                self._hash(number, self._manifest.shards[number].sha256)
        firsts = self._read([Span(self._file(number), 0, FIRST_READ) for number in new])
        for number, first in zip(new, firsts, strict=True):
            self._headers[number] = self._parse(number, first)
        for number in numbers:
            self._headers.move_to_end(number)
        found = {number: self._headers[number] for number in numbers}
        while len(self._headers) > MOST_HEADERS:
            self._headers.popitem(last=False)
        return found

    def _parse(self, number: int, first: bytes) -> _Header:
        """Return the header of a safetensors file that begins with these bytes."""
        length = int.from_bytes(first[:8], "little")
        if not 0 < length <= MAX_HEADER:
            raise self._damaged(number, "it is no safetensors file")
        known = first if len(first) >= 8 + length else self._span(number, 0, 8 + length)
        try:
            fields = json.loads(known[8 : 8 + length])
            places = {name: tuple(map(int, fields[name]["data_offsets"])) for name in fields if name != "__metadata__"}
            shapes = {name: (list(fields[name]["shape"]), fields[name]["dtype"]) for name in places}
            job = fields.get("__metadata__", {}).get(JOB_OF_SHARD)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(number, "it is no safetensors file") from error
        if not isinstance(self._manifest, FirstManifest) and self._manifest.job not in (None, job):
            raise self._damaged(number, "it is of another cache")
        num_rows = shapes.get(self._tensors[0], ([0], ""))[0][0]
        expected = dict(self._manifest.layout.tensors(num_rows))
        if not isinstance(self._manifest, FirstManifest):
            num_conversations = shapes.get(OFFSETS, ([0], ""))[0][0]
            expected[OFFSETS] = ([num_conversations], torch.int64)
            expected[CHECKSUMS] = ([num_conversations, len(self._tensors)], torch.int64)
        for name, (shape, dtype) in expected.items():
            start, end = places.get(name, (0, -1))
            if (
                shapes.get(name) != (shape, NAMES[dtype])
                or end - start != torch.empty(shape, dtype=dtype, device="meta").nbytes
            ):
                where = self._folder.place(self._file(number))
                raise InputError(f"target cache shard {where}: {name} is not {dtype} of shape {shape}; {REMAKE}")
        starts = {name: 8 + length + start for name, (start, _) in places.items()}
        if isinstance(self._manifest, FirstManifest):
            return _Header(starts, {})
        columns = {}
        for name in (OFFSETS, CHECKSUMS):
            start, end = starts[name], starts[name] + places[name][1] - places[name][0]
            columns[name] = np.frombuffer(first[start:end] if end <= len(first) else self._span(number, start, end), np.int64)
        sums = columns[CHECKSUMS].reshape(-1, len(self._tensors)).tolist()
        return _Header(starts, dict(zip(columns[OFFSETS].tolist(), sums, strict=True)))

    def _span(self, number: int, start: int, end: int) -> bytes:
        """Return bytes of a shard, all that were asked for."""
        (content,) = self._read([Span(self._file(number), start, end)])
        if len(content) != end - start:
            raise self._damaged(number, "it ends too early")
        return content

    def _read(self, spans: Sequence[Span]) -> list[bytes]:
        try:
            return self._folder.spans(spans) if spans else []
        except FileNotFoundError as error:
            missing = next((span.file for span in spans if not self._folder.has(span.file)), spans[0].file)
            raise InputError(f"target cache shard {self._folder.place(missing)} is missing; {REMAKE}") from error
        except OSError as error:
            raise InputError(f"target cache {self._folder} cannot be read: {error.strerror or error}") from error

    def _hash(self, number: int, sha256: str) -> None:
        content = self._folder.read(self._file(number))
        if content is None:
            raise InputError(f"target cache shard {self._folder.place(self._file(number))} is missing; {REMAKE}")
        if hashlib.sha256(content).hexdigest() != sha256:
            raise self._damaged(number, "its checksum is not that of the manifest")
        self._hashed.add(number)

    def _file(self, number: int) -> str:
        manifest = self._manifest
        return manifest.shards[number].file if isinstance(manifest, FirstManifest) else SHARD.format(number=number)

    def _damaged(self, number: int, how: str) -> InputError:
        where = self._folder.place(self._file(number))
        return InputError(
            f"target cache shard {where} is damaged, or was changed since the cache was made: {how}; delete it and run "
            "scripts/make_cache.py again, which makes what is missing"
        )

"""Reading rows out of shards: the bytes of each conversation, and no file or map kept open between two batches.

The headers of the `MAX_HEADERS` shards used last are kept; rows are read by their place in the file, from a store all those of
a batch at once. Each conversation is compared with its checksum whenever it is read. safetensors' own `get_slice` reads local
files only, and knows no checksums.
N rows, C conversations of a shard.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.runtime.errors import InputError
from distill.cache.format import CHECKSUMS, JOB_OF_SHARD, OFFSETS, REMAKE, SHARD, CacheManifest
from distill.cache.storage import Folder, Span

MAX_HEADERS = 1024
FIRST_READ = 2**16  # bytes, in which the header lies, mostly with the checksums
MAX_HEADER_BYTES = 2**24


class Wanted(NamedTuple):
    """Rows of a conversation: the first `length` of the `kept` ones that lie from `offset` on."""

    shard: int
    offset: int
    kept: int
    length: int


class _Header(NamedTuple):
    """What is known of a shard without its rows."""

    starts: dict[str, int]  # byte at which each tensor begins
    checksums: dict[int, list[int]]  # by the first row of a conversation: of its bytes in each tensor


class Shards:
    """The shards of a cache; every method raises `InputError` where one is missing, damaged, or was changed."""

    def __init__(self, folder: Folder, manifest: CacheManifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._headers = OrderedDict[int, _Header]()
        self._tensors = list(manifest.layout.tensors(0))

    def rows(self, wanted: Sequence[Wanted], names: Sequence[str], *, pinned: bool = False) -> dict[str, Tensor]:
        """Return rows, one conversation's after the other's, by name; `pinned`: in page-locked memory."""
        headers = self._headers_of(sorted({each.shard for each in wanted}))
        layout, num_rows = self._manifest.layout.tensors(1), sum(each.length for each in wanted)
        sizes = {name: torch.empty(shape, dtype=dtype).nbytes for name, (shape, dtype) in layout.items()}
        spans = []
        for name in names:
            for each in wanted:
                start = headers[each.shard].starts[name] + each.offset * sizes[name]
                spans.append(Span(_file(each.shard), start, start + each.kept * sizes[name]))  # a checksum is that of all rows
        parts = iter(self._read(spans))
        found: dict[str, Tensor] = {}
        for name in names:
            shape, dtype = layout[name]
            found[name] = torch.empty(num_rows, *shape[1:], dtype=dtype, pin_memory=pinned)
            memory, at = found[name].flatten().view(torch.uint8).numpy(), 0
            for each in wanted:
                part, size = next(parts), each.length * sizes[name]
                sums = headers[each.shard].checksums.get(each.offset)
                if sums is None or zlib.crc32(part) != sums[self._tensors.index(name)]:
                    last = each.offset + each.kept
                    raise self._damaged(each.shard, f"its rows {each.offset} to {last} are not those written")
                memory[at : at + size] = np.frombuffer(part, np.uint8, size)
                at += size
        return found

    def _headers_of(self, numbers: Sequence[int]) -> dict[int, _Header]:
        new = [number for number in numbers if number not in self._headers]
        firsts = self._read([Span(_file(number), 0, FIRST_READ) for number in new])
        for number, first in zip(new, firsts, strict=True):
            self._headers[number] = self._parse(number, first)
        for number in numbers:
            self._headers.move_to_end(number)
        found = {number: self._headers[number] for number in numbers}
        while len(self._headers) > MAX_HEADERS:
            self._headers.popitem(last=False)
        return found

    def _parse(self, number: int, first: bytes) -> _Header:
        """Return the header of a safetensors file that begins with these bytes."""
        length = int.from_bytes(first[:8], "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise self._damaged(number, "it is no safetensors file")
        try:
            fields = json.loads(self._span(number, 8, 8 + length, first))
            job = fields["__metadata__"][JOB_OF_SHARD]
            names = (*self._tensors, OFFSETS, CHECKSUMS)
            places = {name: tuple(map(int, fields[name]["data_offsets"])) for name in names}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._damaged(number, "it is no safetensors file, or has other tensors") from error
        if job != self._manifest.job:
            raise self._damaged(number, "it is of another cache")
        offsets, sums = (
            np.frombuffer(self._span(number, 8 + length + start, 8 + length + end, first), np.int64)
            for start, end in (places[OFFSETS], places[CHECKSUMS])
        )
        by_offset = dict(zip(offsets.tolist(), sums.reshape(-1, len(self._tensors)).tolist(), strict=True))
        return _Header({name: 8 + length + start for name, (start, _) in places.items()}, by_offset)

    def _span(self, number: int, start: int, end: int, first: bytes) -> bytes:
        """Return bytes of a shard, all that were asked for; `first` are its first ones, known already."""
        content = first[start:end] if end <= len(first) else self._read([Span(_file(number), start, end)])[0]
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

    def _damaged(self, number: int, how: str) -> InputError:
        where = self._folder.place(_file(number))
        return InputError(
            f"target cache shard {where} is damaged, or was changed since the cache was made: {how}; delete it and run "
            "scripts/cache.py again, which makes what is missing"
        )


def _file(number: int) -> str:
    return SHARD.format(number=number)

"""A journal of a long job's finished pieces, from which an interrupted run goes on where it was.

One line a piece, synced before the next piece begins. The first line is the job's fingerprint; pieces of another job are not
used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from configs.runtime.errors import InputError

logger = logging.getLogger("draftsmith")


def fingerprint(*parts: Any) -> str:
    """Return a hash of JSON values, which should be all that decides a job's pieces."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def files_fingerprint(paths: Iterable[Path]) -> str:
    """Return a fingerprint of files, and of the files in folders, by name, size and time."""
    files = [each for path in paths for each in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return fingerprint([(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files if each.is_file()])


def fingerprint_of(values: Iterable[Any]) -> str:
    """Return `fingerprint` of a list of JSON values, of which one at a time is in memory."""
    total = hashlib.sha256(b"[[")
    for number, value in enumerate(values):
        total.update((", " if number else "").encode() + json.dumps(value, sort_keys=True).encode())
    total.update(b"]]")
    return total.hexdigest()


class Place(NamedTuple):
    """Where a piece lies in a journal, in bytes."""

    start: int
    length: int


class Journal:
    """The pieces of one job, which its fingerprint tells from others, by key. One writer a file."""

    def __init__(self, path: Path, job: str) -> None:
        self.path = path
        self._header = json.dumps({"job": job}).encode() + b"\n"
        self._length: int | None = None  # bytes up to the end of the last whole piece; None until the file was read

    def read(self) -> dict[str, Any]:
        """Return the finished pieces; none where there is no file or it is another job's."""
        return {key: piece for key, _, piece in self.scan()}

    def scan(self) -> Iterator[tuple[str, Place, Any]]:
        """Yield the finished pieces, each with its key and its place; of equal keys the last counts."""
        length = 0
        if self.path.exists():
            with self.path.open("rb") as file:
                length = len(self._header) if file.readline() == self._header else 0
                for line in file if length else ():
                    entry = _parse_piece(line)
                    if entry is None:
                        break
                    yield entry["key"], Place(length, len(line)), entry["piece"]
                    length += len(line)
        self._length = length

    def piece(self, place: Place) -> Any:
        """Return the piece at a place."""
        with self.path.open("rb") as file:
            file.seek(place.start)
            return json.loads(file.read(place.length))["piece"]

    def append(self, key: str, piece: Any) -> None:
        """Keep a finished piece."""
        self.extend({key: piece})

    def extend(self, pieces: Mapping[str, Any]) -> None:
        """Keep finished pieces; they are on the disk when this returns."""
        if self._length is None:
            for _ in self.scan():
                pass
        length = self._length or 0
        lines = b"".join(json.dumps({"key": key, "piece": piece}).encode() + b"\n" for key, piece in pieces.items())
        new = lines if length else self._header + lines
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("r+b" if self.path.exists() else "wb") as file:
                if not length and file.seek(0, os.SEEK_END):
                    logger.info("%s was left by a run with other settings; starting anew", self.path)
                file.truncate(length)
                file.seek(length)
                file.write(new)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._length = length + len(new)


def _parse_piece(line: bytes) -> dict[str, Any] | None:
    """Return a line's entry; None where it was cut off or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("key"), str) and "piece" in entry else None

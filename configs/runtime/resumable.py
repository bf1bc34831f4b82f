"""A journal of a long job's finished pieces, from which an interrupted run goes on where it was.

One line a piece, synced before the next piece begins. The first line is the job's fingerprint; pieces of another job are not
used. A last line that was cut off while it was written is dropped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError

logger = logging.getLogger("draftsmith")


def fingerprint(*parts: Any) -> str:
    """Return a hash of JSON values, which should be all that decides a job's pieces."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Journal:
    """The pieces of one job, by key.

    Args:
        path: where they are kept. One writer a file.
        job: the job's fingerprint.
    """

    def __init__(self, path: Path, job: str) -> None:
        self.path = path
        self._header = json.dumps({"job": job}).encode() + b"\n"
        self._length: int | None = None  # bytes up to the end of the last whole piece; None until the file was read

    def read(self) -> dict[str, Any]:
        """Return the finished pieces; none where there is no file or it is another job's."""
        pieces, self._length = self._scan()
        return pieces

    def append(self, key: str, piece: Any) -> None:
        """Keep a finished piece; it is on the disk when this returns.

        Raises:
            InputError: the file cannot be written.
        """
        length = self._scan()[1] if self._length is None else self._length
        line = json.dumps({"key": key, "piece": piece}).encode() + b"\n"
        new = line if length else self._header + line
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

    def _scan(self) -> tuple[dict[str, Any], int]:
        """Return the whole pieces, and how many bytes the file has up to the end of the last one."""
        content = self.path.read_bytes() if self.path.exists() else b""
        if not content.startswith(self._header):
            return {}, 0
        pieces: dict[str, Any] = {}
        length = len(self._header)
        for line in content[length:].splitlines(keepends=True):
            entry = _parse_piece(line)
            if entry is None:
                break
            pieces[entry["key"]] = entry["piece"]
            length += len(line)
        return pieces, length


def _parse_piece(line: bytes) -> dict[str, Any] | None:
    """Return a line's entry; None where it was cut off or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("key"), str) and "piece" in entry else None

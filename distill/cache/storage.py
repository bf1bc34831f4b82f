"""The folder of a target cache: on a disk, or behind a URL that fsspec knows (`s3://`, `gs://`, `hf://buckets/...`).

A file appears whole or not at all: on a disk by a rename, in an object store by its own rule. Credentials are those that the
store's package finds by itself, in its environment variables, a profile or the machine's role; settings do not hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from fsspec.core import split_protocol, url_to_fs

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import inside, write_bytes
from configs.runtime.redaction import redact

ON_DISK = (None, "file", "local")


class Span(NamedTuple):
    """Some bytes of a file; those beyond its end are not there."""

    file: str
    start: int
    end: int


class Folder:
    """A folder by path or URL, which is `InputError` where it cannot be reached; `path` is None where it is not on a disk."""

    def __init__(self, name: str | Path) -> None:
        protocol, path = split_protocol(str(name))
        self.name = redact(str(name))
        self.path = Path(path) if protocol in ON_DISK else None
        if self.path is None:
            with self._reporting("be opened"):
                self._store, self._root = url_to_fs(str(name))

    def __str__(self) -> str:
        return self.name

    def place(self, file: str) -> str:
        return f"{self.name.rstrip('/')}/{file}"

    def names(self) -> set[str]:
        """Return the names of the files; none where there is no such folder."""
        if self.path is not None:
            return {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        found: list[str] = []
        with suppress(FileNotFoundError), self._reporting("be listed", FileNotFoundError):
            self._store.invalidate_cache()
            found = self._store.ls(self._root, detail=False)
        return {path.rstrip("/").rsplit("/", 1)[-1] for path in found} - {""}

    def has(self, file: str) -> bool:
        if self.path is not None:
            return (self.path / file).exists()
        with self._reporting("be read"):
            self._store.invalidate_cache()
            return bool(self._store.exists(f"{self._root}/{file}"))

    def read(self, file: str) -> bytes | None:
        """Return a file's bytes; None where there is no such file."""
        try:
            if self.path is not None:
                return inside(self.path, file, f"target cache {self.path}").read_bytes()
            with self._reporting("be read", FileNotFoundError):
                return bytes(self._store.cat_file(f"{self._root}/{file}"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"cannot read {self.place(file)}: {error.strerror or error}") from error

    def spans(self, spans: Sequence[Span]) -> list[bytes]:
        """Return the bytes of each span; a store is asked for all of them at once."""
        if self.path is None:
            with self._reporting("be read", FileNotFoundError):
                paths = [f"{self._root}/{span.file}" for span in spans]
                starts, ends = [span.start for span in spans], [span.end for span in spans]
                return [bytes(part) for part in self._store.cat_ranges(paths, starts, ends, on_error="raise")]
        found: dict[int, bytes] = {}
        for name, places in groupby(sorted(range(len(spans)), key=lambda place: spans[place]), lambda place: spans[place].file):
            with inside(self.path, name, f"target cache {self.path}").open("rb") as file:
                for place in places:
                    file.seek(spans[place].start)
                    found[place] = file.read(spans[place].end - spans[place].start)
        return [found[place] for place in range(len(spans))]

    def write(self, file: str, content: bytes) -> None:
        """Write a file, whole or not at all."""
        if self.path is not None:
            write_bytes(self.path / file, content)
            return
        with self._reporting("be written"):
            self._store.pipe_file(f"{self._root}/{file}", content)

    def create(self, file: str, content: bytes) -> bool:
        """Write a small file unless there is one; return whether that was done. A store may say so to two writers at a time."""
        try:
            if self.path is not None:
                self.path.mkdir(parents=True, exist_ok=True)
                with (self.path / file).open("xb") as new:
                    new.write(content)
                return True
            with self._reporting("be written", FileExistsError):
                if self.has(file):
                    return False
                self._store.pipe_file(f"{self._root}/{file}", content, mode="create")
                return True
        except FileExistsError:
            return False
        except OSError as error:
            raise InputError(f"cannot write {self.place(file)}: {error.strerror or error}") from error

    def delete(self, files: Iterable[str]) -> None:
        """Delete files; those that are not there are passed over."""
        for file in files:
            if self.path is not None:
                (self.path / file).unlink(missing_ok=True)
                continue
            with suppress(FileNotFoundError), self._reporting("be written", FileNotFoundError):
                self._store.rm_file(f"{self._root}/{file}")

    @contextmanager
    def _reporting(self, what: str, *passed: type[OSError]) -> Iterator[None]:
        """Turn a store's failure into a sentence; errors of the types `passed` are left to the caller."""
        try:
            yield
        except InputError:
            raise
        except ImportError as error:
            raise InputError(f"{self.name} cannot {what}: its package is not installed here ({first_line(error)})") from error
        except Exception as error:  # each store's package has errors of its own
            if isinstance(error, passed):
                raise
            raise InputError(
                f"{self.name} cannot {what}: {type(error).__name__}: {redact(first_line(error))} (credentials are those that "
                "the store's own package finds: environment variables, a profile, the machine's role)"
            ) from error

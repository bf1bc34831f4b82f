"""Reading, writing and fetching files: nothing half-written is left behind, and every error names its file and line.

Files and folders are written beside their place, synced and renamed. `folder_lock` keeps an output folder to one process.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from configs.runtime.errors import InputError, first_line

logger = logging.getLogger("draftsmith")

LOCK_FILE = ".lock"
SURELY_LOCKED_SECONDS = 60  # after which a new folder is locked by its maker, if that lives
TORCH_FILE = "pytorch_model.bin"  # weights as pickles, which other programs write
DESCRIPTIONS = ("config.json", "generation_config.json", "draftsmith.json")
MAX_DESCRIPTION_BYTES = 10_000_000
ADAPTER_FILE = "adapter_config.json"  # peft's
LFS_POINTER = b"version https://git-lfs"
IS_POINTER = "is a stand-in by git-lfs for a file that was not fetched: run `git lfs pull` in its folder"
CHECKOUT = Path(__file__).resolve().parents[2]  # or the folder of packages that a wheel was installed into


def downloads_folder() -> Path:
    """Return the folder for downloads: `$DRAFTSMITH_CACHE`, else `.cache` in the checkout, else one in the home folder."""
    if named := os.environ.get("DRAFTSMITH_CACHE"):
        return Path(named)
    is_checkout = (CHECKOUT / "pyproject.toml").is_file()
    return CHECKOUT / ".cache" if is_checkout else Path.home() / ".cache" / "draftsmith"


def find_shipped(path: str | Path) -> Path:
    """Return where a file is: as named, else, for a relative path that is not there, what came with draftsmith under it."""
    path = Path(path)
    shipped = CHECKOUT / path
    return shipped if not path.is_absolute() and not path.exists() and shipped.exists() else path


def out_of_space(error: BaseException) -> bool:
    """Return whether an error says that the disk is full or its quota used up; other libraries have classes of their own."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def write_text(path: Path, text: str) -> None:
    """Write a text file; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file beside its place, sync it to disk, then rename it over `path`."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with scratch.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
            sync(path.parent)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON; NaN and infinities are refused."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path`, which replaces `path` once it is synced to disk; on any error it is removed.

    What a killed process has left there is removed, too: it holds no lock on it any more.
    """
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        with _own(scratch):
            _drop_abandoned(path)
            yield scratch
            sync_folder(scratch)
            old = scratch.with_name(scratch.name + ".old")
            if path.exists():
                path.replace(old)
            scratch.replace(path)
            sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
        if old.exists():
            logger.warning("%s is written, but the folder it replaces cannot be removed; remove %s", path, old)
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if out_of_space(error):
            raise InputError(f"cannot write {path}: {first_line(error)}") from error
        raise


def drop_leftovers(path: Path) -> None:
    """Remove what a killed `new_folder` left beside `path`; a folder that it had only moved out of the way is put back.

    Call it under `folder_lock`: nothing else may be writing `path`.
    """
    name = _leftovers_of(path)
    for old in [*path.parent.glob(f"{name}.old")]:
        if not path.exists():
            old.replace(path)
    for left in [*path.parent.glob(name), *path.parent.glob(f"{name}.old")]:
        if left.is_dir():
            shutil.rmtree(left)


def _leftovers_of(path: Path) -> str:
    """Return a pattern for the folders that `new_folder` makes beside `path`."""
    return f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}"


@contextmanager
def _own(folder: Path) -> Iterator[bool]:
    """Lock a folder itself until the block ends, or this process does; yield whether it was free, False without locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _drop_abandoned(path: Path) -> None:
    for left in path.parent.glob(_leftovers_of(path)):
        with suppress(OSError):  # another process has removed it
            if time.time() - left.stat().st_mtime < SURELY_LOCKED_SECONDS:
                continue
            with _own(left) as is_free:
                if is_free:
                    shutil.rmtree(left)


def sync_folder(folder: Path) -> None:
    """Return once all files below `folder`, and the folders that list them, are on the disk."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            sync(path)


def sync(path: Path) -> None:
    """Return once a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def inside(folder: Path, name: str, what: str) -> Path:
    """Return `folder/name` for a name that a file, called `what` in errors, gives; it must not lead out of `folder`."""
    path = folder / name
    try:
        within = bool(name) and not Path(name).is_absolute() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, a loop of links
        within = False
    if not within or path.resolve() == folder.resolve():
        raise InputError(f"{what}: expected the name of a file in {folder}, got {name[:60]!r}, which leads out of it")
    return path


def check_readable(folder: Path) -> None:
    """Refuse a folder with a pipe, a socket or a device, reading which may never end, or a huge description of a model.

    An adapter is refused, too: transformers puts it on the model beside it, whose weights and hash say nothing of it.
    """
    for path in sorted(folder.iterdir()):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InputError(f"{path}: expected a file, got a pipe, a socket or a device; remove it from the folder")
        if path.name == ADAPTER_FILE:
            raise InputError(
                f"{path} puts a PEFT adapter on a model: merge the two (merge_and_unload of peft), save the result by "
                "save_pretrained into another folder with the tokenizer, and name that; or take the adapter's files out"
            )
        if path.name in DESCRIPTIONS and path.is_file() and path.stat().st_size > MAX_DESCRIPTION_BYTES:
            raise InputError(f"{path} has {path.stat().st_size:,} bytes; such a file has some thousand, 10 million at most")


def read_text(path: Path, what: str) -> str:
    """Return a UTF-8 text file's content; `what` names its role in the error."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"{what} not found: {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {what} {path}: {error}") from error
    if text.startswith(LFS_POINTER.decode()):
        raise InputError(f"{what} {path} {IS_POINTER}")
    return text


def read_json(path: Path, what: str) -> Any:
    """Return a JSON file's value; `what` names its role in the error."""
    text = read_text(path, what)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        raise InputError(f"{what} {path} is not JSON: {error}") from error


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Return a JSON file's object; `what` names its role in the error."""
    value = read_json(path, what)
    if not isinstance(value, dict):
        raise InputError(f"{what} {path}: expected an object, got {type(value).__name__}")
    return value


def read_jsonl(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each non-blank line of a JSONL file; there must be one."""
    found = False
    # Not splitlines: it also cuts at U+2028 and its like, which may stand raw inside a JSON text.
    for number, line in enumerate(read_text(path, what).split("\n"), 1):
        if not line.strip():
            continue
        found = True
        yield number, json_object(line, f"{what} {path}, line {number}")
    if not found:
        raise InputError(f"{what} {path} is empty")


def json_object(line: str | bytes, where: str) -> dict[str, Any]:
    """Return a line of JSONL as an object; `where` names it in the error."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or bytes that are no UTF-8, are the former
        raise InputError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected an object, got {type(value).__name__}")
    return value


@contextmanager
def folder_lock(folder: Path, *, beside: bool = False) -> Iterator[None]:
    """Keep other processes from locking `folder` until the block ends, by a lock file that stays there, empty.

    The kernel releases the lock when the process ends, however it ends. `beside` the folder lies the lock file of one that is
    replaced as a whole; else the folder is made. A filesystem without locks (some network ones) is only warned of.
    """
    path = folder.with_name(f".{folder.name}{LOCK_FILE}") if beside else folder / LOCK_FILE
    lock = filelock.FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout as error:
        raise InputError(
            f"output: another process is at work in {folder}; wait until it has ended, or name another output"
        ) from error
    except OSError as error:
        if not (path.is_file() and os.access(path, os.W_OK)):  # else only the lock was refused, by one of many numbers
            raise InputError(f"output: {folder} cannot be written: {error.strerror or error}") from error
        logger.warning("%s cannot be locked (%s): nothing stops a second process from writing there", folder, error.strerror)
    try:
        yield
    finally:
        lock.release()


class BackgroundWrite:
    """At most one write at a time, by a thread that ends with it; the interpreter does not end before it."""

    def __init__(self) -> None:
        self._under_way: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Start a write, once the one before has ended; raises what that one raised."""
        self.wait()
        pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._under_way = pool.submit(write)
        pool.shutdown(wait=False)

    def check(self) -> None:
        """Raise what the last write raised, if it has ended; the host does not wait."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Return once nothing is being written; raises what the last write raised, once."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()


def fetch_wheel(requirement: str, folder: Path, setting: str) -> Path:
    """Download a wheel by pip, without what it depends on, into an empty folder; `setting` asks for it, and is named in errors.

    Nothing is installed and no code of it runs: sources are not taken, which pip would have to build.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    fetched = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if fetched.returncode != 0:
        said = (fetched.stderr.strip() or fetched.stdout.strip()).splitlines()
        raise InputError(f"{setting}: {requirement} could not be fetched by pip: {said[-1] if said else 'no reason given'}")
    return next(folder.glob("*.whl"))

"""One process at a time in an output folder: an exclusive lock (flock) on a small file in it or beside it.

The kernel releases the lock when the process ends, however it ends, so a killed run leaves nothing to clean up; the empty
file stays. Of several processes that share a run only the main one claims. Filesystems without locks (some network ones)
cannot guard a folder: that is said in the log.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.errors import InputError

LOCK_FILE = ".lock"

logger = logging.getLogger("draftsmith")


@contextmanager
def claimed(folder: Path, *, beside: bool = False) -> Iterator[None]:
    """Keep other processes from claiming `folder` until the block ends.

    Args:
        folder: made where there is none, unless `beside`.
        beside: lock a file beside the folder, for one that is replaced as a whole.

    Raises:
        InputError: another process has claimed it, or it cannot be written.
    """
    try:
        lock = folder.with_name(f".{folder.name}{LOCK_FILE}") if beside else folder / LOCK_FILE
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("ab")
    except OSError as error:
        raise InputError(f"output: {folder} cannot be written: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"output: another process is at work in {folder}; wait until it has ended, or name another output"
            ) from error
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): nothing stops a second process from writing there", folder, error.strerror
            )
        yield

"""Large files taken over into another folder: linked where the file system allows, so that a target is not copied.

A link shares its bytes with the file it is made from. What is to be changed is first made a copy of its own, which a file
system that can (btrfs, XFS) makes without copying the bytes either.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path


def link_or_copy(path: str | Path, to: str | Path) -> None:
    """Link a file where the file system allows, copy it elsewhere; a symbolic link stands for what it leads to."""
    path = Path(path).resolve()
    try:
        os.link(path, to)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(path, to)


def make_own(path: Path) -> None:
    """Make a file that may share its bytes with others one of its own, to which one may write."""
    if path.stat().st_nlink > 1:
        copy = path.with_name(f".{path.name}.own")
        _copy_bytes(path, copy)
        shutil.copystat(path, copy)
        copy.replace(path)
    path.chmod(path.stat().st_mode | stat.S_IWUSR)


def _copy_bytes(path: Path, to: Path) -> None:
    with path.open("rb") as source, to.open("wb") as target:
        left = path.stat().st_size
        try:
            while left:
                left -= os.copy_file_range(source.fileno(), target.fileno(), left)
        except (AttributeError, OSError):  # not on this system, or not between these files
            source.seek(0)
            target.seek(0)
            shutil.copyfileobj(source, target, 1 << 24)

"""The folder that a target cache is made in: what may lie there already, and whether there is room for the rest."""

from __future__ import annotations

import shutil
from pathlib import Path

from configs.runtime.errors import InputError
from configs.runtime.files import LOCK_FILE
from distill.cache.format import MANIFEST

# What a run may leave behind, scratch files of a killed one among it, and what it may throw away.
DISPOSABLE = (MANIFEST, "shard-[0-9]*.safetensors", "shard-[0-9]*.json", ".shard-[0-9]*", f".{MANIFEST}.*", ".run.json.*")
OURS = (*DISPOSABLE, "run.json", LOCK_FILE)


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but a cache: what lies there may be overwritten.

    Raises:
        InputError: it does, or is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output: {folder} is a file; name a folder that is new or holds a target cache")
    ours = {path.name for pattern in OURS for path in folder.glob(pattern)}
    others = sorted({path.name for path in folder.glob("*")} - ours)
    if others:
        raise InputError(f"output: {folder} holds {others[0]}, which is no part of a target cache; name a folder of its own")


def check_room(folder: Path, num_bytes: int) -> None:
    """Refuse to begin what the disk has no room for.

    Raises:
        InputError: fewer than `num_bytes` bytes are free.
    """
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(above).free
    if free < num_bytes:
        raise InputError(
            f"output: {folder} needs {num_bytes / 1e6:.1f} MB more, and its disk has {free / 1e6:.1f} MB free; name a folder "
            "elsewhere, or keep less (kind: top_k for a draft LM, fewer taps for a head, a smaller max_length)"
        )

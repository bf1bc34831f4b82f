"""Checkpoints: everything a run needs to go on as if it had not stopped, written beside and renamed.

accelerate writes model, optimiser, schedule and random states; `Progress` adds the place in the data and the best score. A
folder counts as a checkpoint only under its final name, so an interrupted write is never resumed from.
"""

from __future__ import annotations

import pickle
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError

from configs.errors import InputError, first_line
from configs.files import read_text, write_text

NAME = re.compile(r"step-(\d{8})")
CONFIG_HASH = "config.sha256"  # of the run it belongs to; known before anything is loaded into models of another shape


@dataclass
class Progress:
    """Where a run is. accelerate saves and restores it through `state_dict` and `load_state_dict`."""

    step: int = 0  # optimiser steps done
    epoch: int = 0
    steps_in_epoch: int = 0
    best_score: float | None = None  # tokens per target step on held-out prompts
    best_step: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def save_checkpoint(accelerator: Accelerator, folder: Path, step: int, *, keep: int, config_sha256: str) -> Path:
    """Write `folder/step-N` (all processes take part), then drop all but the newest `keep`.

    Those of later steps were left by a run that this one does not go on from (`schedule.resume: false`): they are dropped as
    well, or they would be taken for the newest.

    Args:
        accelerator: holds what is saved.
        folder: where checkpoints lie.
        step: optimiser steps done.
        keep: how many checkpoints stay, at least 1.
        config_sha256: hash of the run's config.
    """
    final = folder / f"step-{step:08d}"
    scratch = folder / f".{final.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(scratch))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_text(scratch / CONFIG_HASH, config_sha256)
        shutil.rmtree(final, ignore_errors=True)
        scratch.replace(final)
        found = list_checkpoints(folder)
        newest = found.index(final) + 1
        for other in [*found[: max(0, newest - keep)], *found[newest:]]:
            shutil.rmtree(other)
    accelerator.wait_for_everyone()
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))


def load_checkpoint(accelerator: Accelerator, path: Path, config_sha256: str) -> None:
    """Restore a checkpoint into everything that `accelerator` prepared or was given to keep.

    Raises:
        InputError: it cannot be read, or belongs to a run with another config.
    """
    if read_text(path / CONFIG_HASH, "config hash of a checkpoint") != config_sha256:
        raise InputError(
            f"checkpoint {path} belongs to a run with another config; choose another output, or set schedule.resume=false"
        )
    try:
        accelerator.load_state(str(path))
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise InputError(f"checkpoint {path} cannot be read: {first_line(error)}") from error

"""Checkpoints: everything a run needs to resume as if it had not stopped, written to a scratch folder, synced and renamed.

A thread writes model and optimiser from a copy in host memory while training goes on, in accelerate's format; sharded ones
accelerate writes itself, before training goes on, and the thread hashes and syncs them. `progress.json` adds the place in the
data, the best score and the schedule. `checkpoint.json` comes last: it names every file with its SHA-256 and the run they
belong to. A checkpoint that is cut short, damaged or another run's is passed over with a warning, and the one before it is
taken.

Files are JSON, safetensors, or loaded with `weights_only`, so they cannot run code (accelerate's `register_for_checkpointing`
could). Only DeepSpeed and FSDP read their own files in their own ways: resume from theirs only where you trust who wrote them.
"""

from __future__ import annotations

import copy
import logging
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from accelerate import Accelerator
from accelerate.checkpointing import save_accelerator_state
from accelerate.utils import OPTIMIZER_NAME, RNG_STATE_NAME, SAFE_WEIGHTS_NAME, broadcast_object_list, load, recursively_apply
from accelerate.utils import save as write_state
from pydantic import ConfigDict, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import BackgroundWrite, inside, read_json, sha256_of, sync, sync_folder, write_json
from configs.schema.base import NonNegativeInt, Settings
from train.loop.lineage import REPLICATED, Lineage, engine_name

NAME = re.compile(r"step-(\d{8})")
UNFINISHED = ".step-*"  # being written, or being dropped
MANIFEST = "checkpoint.json"
PROGRESS = "progress.json"
START_AGAIN = "choose another output, or set schedule.resume=false to start from the beginning"

logger = logging.getLogger("draftsmith")
T = TypeVar("T", bound=Settings)


class Progress(Settings):
    """Where a run is."""

    model_config = ConfigDict(frozen=False)

    step: NonNegativeInt = 0  # optimiser steps done
    epoch: NonNegativeInt = 0
    steps_in_epoch: NonNegativeInt = 0
    evaluation_pending: bool = False  # the one due after the last step is to be made
    best_score: float | None = None  # tokens per target step on held-out prompts
    best_step: NonNegativeInt | None = None


class SavedProgress(Settings):
    """The content of `progress.json`."""

    progress: Progress
    schedule: dict[str, Any]  # the state of the learning rate's


class CheckpointManifest(Settings):
    """The content of `checkpoint.json`."""

    format_version: Literal[1] = 1
    step: NonNegativeInt
    lineage: Lineage
    sha256: dict[str, str]  # of each file, by its path in the checkpoint


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a run, which all of its processes write and read together."""

    folder: Path
    accelerator: Accelerator
    module: nn.Module  # as the engine prepared it, like the optimiser
    optimizer: Any
    scheduler: LambdaLR  # stepped by the training loop, not by accelerate
    lineage: Lineage
    keep: int  # how many of the newest are kept, at least 1; that of the best step is kept as well
    progress: Progress = field(default_factory=Progress)  # saved, and restored in place
    _background: BackgroundWrite = field(default_factory=BackgroundWrite, init=False)

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint of the state as it is now, then drop those no longer kept, and those of later steps.

        Without `wait` it is written meanwhile, and the next one waits for it. An InputError says that it, or the one before,
        cannot be written, as on a full disk; those before stay as they are.
        """
        self.finish()
        final = self.folder / f"step-{self.progress.step:08d}"
        scratch = self.folder / f".{final.name}.partial"
        with writing(final, scratch):
            if self.accelerator.is_main_process:
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            rest = self._write(scratch)
            self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            place = SavedProgress(progress=self.progress.model_copy(), schedule=copy.deepcopy(self.scheduler.state_dict()))
            self._background.start(partial(self._complete, scratch, final, rest, place))
        if wait:
            self.finish()
            self.accelerator.wait_for_everyone()

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written meanwhile; see `save`."""
        self._background.check()

    def finish(self) -> None:
        """Return once the last checkpoint is written; for errors see `save`."""
        self._background.wait()

    def _write(self, scratch: Path) -> list[Callable[[], None]]:
        """Write what must be written now; return what a thread of the main process may write later."""
        accelerator = self.accelerator
        if engine_name(accelerator) != REPLICATED:
            accelerator.save_state(str(scratch))
            return []
        # As `Accelerator.save_state` does, but for the states that are large.
        save_accelerator_state(str(scratch), [], [], [], [], accelerator.process_index, accelerator.step, accelerator.scaler)
        if not accelerator.is_main_process:
            return []
        module = self.module.module if isinstance(self.module, DistributedDataParallel) else self.module
        weights = host_copy(accelerator.get_state_dict(module, unwrap=False))
        return [
            partial(write_state, weights, scratch / SAFE_WEIGHTS_NAME, safe_serialization=True),
            partial(write_state, host_copy(self.optimizer.state_dict()), scratch / f"{OPTIMIZER_NAME}.bin"),
        ]

    def _complete(self, scratch: Path, final: Path, rest: list[Callable[[], None]], place: SavedProgress) -> None:
        """Write the rest of a checkpoint and the manifest over all of its files, and put it in place."""
        with writing(final, scratch):
            for write in rest:
                write()
            write_json(scratch / PROGRESS, place.model_dump())
            hashes = {name: sha256_of(scratch / name) for name in sorted(_files(scratch))}
            manifest = CheckpointManifest(step=place.progress.step, lineage=self.lineage, sha256=hashes)
            write_json(scratch / MANIFEST, manifest.model_dump(mode="json"))
            sync_folder(scratch)
            _drop(final)
            scratch.replace(final)
            sync(self.folder)
            found = list_checkpoints(self.folder)
            end = found.index(final) + 1
            for other in [*found[: max(0, end - self.keep)], *found[end:]]:
                if other.name != f"step-{place.progress.best_step or 0:08d}":
                    _drop(other)

    def resume(self) -> Path | None:
        """Restore the newest usable checkpoint and return it: None where there is none, an InputError where none is usable."""
        found: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            self._clear_up()
            found = list(self._choose())
        path, complaint = broadcast_object_list(found)
        if complaint is not None:
            raise InputError(complaint)
        if path is not None:
            self._load(path)
        return path

    def _clear_up(self) -> None:
        """Remove what a killed process left half-written; finish the rename of what is complete."""
        for left in self.folder.glob(UNFINISHED):
            final = self.folder / left.name.split(".")[1]
            if left.suffix == ".partial" and (left / MANIFEST).exists() and not final.exists():
                left.replace(final)
            else:
                shutil.rmtree(left)

    def _choose(self) -> tuple[Path | None, str | None]:
        """Return the checkpoint to resume from, or why none of those found is usable."""
        complaints = []
        for path in reversed(list_checkpoints(self.folder)):
            complaint = self._objection(path)
            if complaint is None:
                return path, None
            logger.warning("checkpoint %s %s; passed over", path, complaint)
            complaints.append(f"checkpoint {path} {complaint}")
        return None, f"{complaints[0]}, and none before it is usable; {START_AGAIN}" if complaints else None

    def _objection(self, path: Path) -> str | None:
        """Return why a checkpoint cannot be used, as a phrase that follows its name."""
        try:
            manifest = read_manifest(path)
            if (objection := self.lineage.objection(manifest.lineage)) is not None:
                return objection
            if others := _files(path) - {*manifest.sha256, MANIFEST}:
                return f"is damaged: it holds {min(others)}, which was not written with it"
            for name, sha256 in manifest.sha256.items():
                if sha256_of(inside(path, name, MANIFEST)) != sha256:
                    return f"is damaged: {name} is not what was written"
            _read(SavedProgress, path / PROGRESS)
        except InputError as error:
            return f"is damaged: {error}"
        return None

    def _load(self, path: Path) -> None:
        rank, now = self.accelerator.process_index, self.accelerator.num_processes
        then = read_manifest(path).lineage.num_processes
        try:
            if rank < then:  # accelerate itself ignores random states that it cannot read
                load(path / f"{RNG_STATE_NAME}_{rank}.pkl")
            self.accelerator.load_state(str(path))
        except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
            raise InputError(f"checkpoint {path} cannot be read: {first_line(error)}; {START_AGAIN}") from error
        saved = _read(SavedProgress, path / PROGRESS)
        vars(self.progress).update(vars(saved.progress))
        self.scheduler.load_state_dict(saved.schedule)
        if now != then:
            said = "%s was written by %d processes, this run has %d: equal up to rounding, and without the same random numbers"
            logger.warning(said, path, then, now)


def host_copy(state: Any) -> Any:
    """Return a copy of a state dict in host memory; tied weights stay tied."""
    known: dict[Any, Tensor] = {}

    def copied(value: Tensor) -> Tensor:
        # One without elements has no place in memory.
        place = value.data_ptr() if value.numel() else id(value)
        key = (value.device, place, value.dtype, value.shape, value.stride())
        if key not in known:
            known[key] = value.detach().to("cpu", copy=True)
        return known[key]

    return recursively_apply(copied, state)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first, complete or not."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))


def read_manifest(path: Path) -> CheckpointManifest:
    """Return a checkpoint's manifest; the files may still differ from it."""
    return _read(CheckpointManifest, path / MANIFEST)


@contextmanager
def writing(path: Path, scratch: Path | None = None) -> Iterator[None]:
    """Report a failure to write `path` by an InputError of one sentence, and remove `scratch`, which was to become it."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, InputError) as error:
        # torch.save wraps an OSError in a RuntimeError of its own.
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        free = shutil.disk_usage(path.parent if path.parent.is_dir() else Path()).free
        raise InputError(
            f"cannot write {path}: {first_line(error)} ({free / 1e6:.1f} MB free on its disk); what was written before stands. "
            "Rerun the same command to resume."
        ) from error


def _read(schema: type[T], path: Path) -> T:
    try:
        return schema.model_validate(read_json(path, path.stem))
    except ValidationError as error:
        raise InputError(f"{path.name} does not follow the format: {first_line(error)}") from error


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def _drop(path: Path) -> None:
    """Remove a checkpoint; at no time does a part of it bear its name."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.dropped")
        shutil.rmtree(doomed, ignore_errors=True)
        path.replace(doomed)
        shutil.rmtree(doomed)

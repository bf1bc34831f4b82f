"""Making a target cache: one forward of the target, here or on a server, over each training conversation, kept in a folder.

Conversations are assigned to shards by length alone, and the batches of a shard are made of its own conversations, so a shard's
bytes are the same whoever makes it and however often that was interrupted (a server chooses its own batches and may round
otherwise). Process r of n makes the shards r, r + n, ... that are not there yet. The manifest is written last.
N rows, E width of the target, A taps.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import LOCK_FILE, BackgroundWrite, folder_lock, write_bytes, write_json
from configs.runtime.run_record import RECORD, fingerprint, write_run_record
from configs.runtime.terminal import progress
from configs.schema.data import CacheConfig
from distill.cache.reader import (
    DISPOSABLE,
    MADE_OF,
    MANIFEST,
    SHARD,
    CacheManifest,
    RowLayout,
    checksum_of,
    made_of,
    place_rows,
    tap_name,
)
from distill.dataset.batches import ConversationDataset, Example, collate
from distill.dataset.conversations import Conversation, check_written_for, open_conversations
from distill.loss.fused import normalise
from distill.server.states import EngineStates
from heads.frozen.hidden_states import check_taps, num_blocks, read_states
from heads.frozen.identity import remembered_sha256
from heads.frozen.loading import Target, load_target
from heads.frozen.processes import join_processes, naming_lost_processes, share_of
from heads.modules.interface import NO_DOCUMENT

logger = logging.getLogger("draftsmith")

LONGEST_WAIT_SECONDS = 86_400  # of processes for one that is still at its share
CHUNK_SIZE = 128  # positions whose logits live at one time


def make_cache(config: CacheConfig) -> None:
    """Make the cache that `config` describes; an interrupted run of the same settings resumes."""
    output, data_file = Path(config.output), Path(config.data)
    with ExitStack() as stack:
        check_folder(output)
        conversations = open_conversations(data_file)
        state = join_processes(config.target, timeout_seconds=LONGEST_WAIT_SECONDS)
        if state.is_main_process:
            stack.enter_context(folder_lock(output))
        stack.enter_context(naming_lost_processes())
        target = load_target(config.target, takes_states=True)
        if config.target.states is not None:
            engine = stack.enter_context(closing(EngineStates(config.target.states, target)))
            engine.serve(config.taps)
            target = replace(target, states_from=engine)
        for difference in check_written_for(data_file, target.identity):
            logger.warning("%s was written by a target with other %s", data_file, difference)
        job = CacheJob(target=target, conversations=conversations, config=config, data_sha256=remembered_sha256(data_file))
        share = share_of(target.group, state)
        if state.is_main_process:
            job.prepare()
        elif share.number == 0:  # holds a part of the main process's target, which `prepare` runs
            check_taps(target.model, config.taps)
        state.wait_for_everyone()
        started = time.monotonic()
        job.work(rank=share.number, num_processes=share.count, writes=share.writes)
        state.wait_for_everyone()
        if state.is_main_process:
            job.finish()
            write_run_record(output, config, seconds=time.monotonic() - started)  # of this start


class CacheJob:
    """A cache to be made by one or several processes."""

    def __init__(self, *, target: Target, conversations: Sequence[Conversation], config: CacheConfig, data_sha256: str) -> None:
        self.target, self.config, self.data_sha256, self.folder = target, config, data_sha256, Path(config.output)
        self.layout = layout_of(config, target.model)
        self.dataset = ConversationDataset(conversations, config.max_length)
        self.rows_per_shard = max(1, int(config.shard_megabytes * 1e6 / self.layout.bytes_per_row))
        self.places = place_rows(self.dataset, self.rows_per_shard)
        self.num_rows = self.places.rows_of_shards
        # A hash of all that decides the bytes of the shards. target.forward does not count: only decoding runs another than
        # transformers' (`heads.inference.causal_lm`).
        self.digest = fingerprint(
            self.layout.model_dump(),
            target.identity.to_dict(),
            [config.target.dtype, config.target.attention, data_sha256],
            [config.max_length, config.batch_size, config.shard_megabytes],
        )

    def prepare(self) -> None:
        """Delete files of another job and check that there is room for the rest. Called by one process."""
        check_taps(self.target.model, self.layout.taps)
        there = self.finished()
        row, num_rows = self.layout.bytes_per_row, sum(self.num_rows)
        logger.info("target cache: %d bytes a token, %.1f MB in all", row, row * num_rows / 1e6)
        if there:
            logger.info("%d of %d shards were finished by an earlier run", len(there), len(self.num_rows))
        check_room(self.folder, row * (num_rows - sum(self.num_rows[number] for number in there)))
        keep = set(map(_file, there))
        for path in self.folder.glob("*"):
            if DISPOSABLE.fullmatch(path.name) and path.name not in keep:
                path.unlink()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_run_record(self.folder, self.config)

    def work(self, *, rank: int, num_processes: int, writes: bool = True) -> None:
        """Write this process's share of the shards that are not there.

        Without `writes` this process only computes what the first one of the target's group writes.
        """
        own, there = range(rank, len(self.num_rows), num_processes), self.finished()
        num_rows = sum(self.num_rows[number] for number in own)
        done = sum(self.num_rows[number] for number in there.intersection(own))
        write = BackgroundWrite()
        with progress("target cache", num_rows, "tokens", done=done) as advance:
            try:
                for number in (each for each in own if each not in there):
                    tensors = self._tensors(number)
                    if writes:
                        write.start(partial(self._write, number, tensors))  # once the one before is there
                    advance(self.num_rows[number])
            finally:
                write.wait()

    def finished(self) -> set[int]:
        """Return the shards that are there, made by this job."""
        return {number for number in range(len(self.num_rows)) if _job_of(self.folder / _file(number)) == self.digest}

    def finish(self) -> CacheManifest:
        """Write the manifest, which completes the cache; `RuntimeError` where a shard is missing."""
        if missing := sorted(set(range(len(self.num_rows))) - self.finished()):
            raise RuntimeError(f"{len(missing)} shards are missing in {self.folder}, the first is {missing[0]}")
        manifest = CacheManifest(
            layout=self.layout,
            target=self.target.identity.to_dict(),
            data_file=self.config.data,
            data_sha256=self.data_sha256,
            max_length=self.config.max_length,
            rows_per_shard=self.rows_per_shard,
            job=self.digest,
        )
        write_json(self.folder / MANIFEST, manifest.model_dump(mode="json"))
        return manifest

    def _write(self, number: int, tensors: dict[str, Tensor]) -> None:
        checksum = checksum_of(tensors[name] for name in self.layout.tensors(0))
        write_bytes(self.folder / _file(number), save(tensors, metadata={MADE_OF: f"{self.digest} {checksum}"}))

    def _tensors(self, number: int) -> dict[str, Tensor]:
        """Return the rows of a shard's conversations, one conversation after the other."""
        indices = np.flatnonzero(self.places.shard_C[self.dataset.numbers] == number)
        examples = [self.dataset[int(index)] for index in indices]
        offsets = [int(self.places.offset_C[example.conversation]) for example in examples]
        layout = self.layout.tensors(self.num_rows[number])
        tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}
        for group, states_ANE in read_examples(self.target, examples, self.layout.taps, self.config.batch_size):
            rows_N = torch.cat([offsets[index] + torch.arange(len(examples[index].input_ids)) for index in group])
            for name, values in encode(self.target, self.layout, states_ANE).items():
                tensors[name][rows_N] = values
        return tensors


def read_examples(
    target: Target, examples: Sequence[Example], taps: Sequence[int], batch_size: int
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield places of examples, and the final states and those of the taps `[N, E]`, one example after the other."""
    if target.states_from is not None:
        assert isinstance(target.states_from, EngineStates)
        served = target.states_from.of_each([example.input_ids for example in examples], taps)
        yield from (([place], [state_1TE[0] for state_1TE in (s.final_BTE, *s.taps_ABTE)]) for place, s in enumerate(served))
        return
    order = sorted(range(len(examples)), key=lambda place: len(examples[place].input_ids))  # of similar length
    for start in range(0, len(order), batch_size):
        group = sorted(order[start : start + batch_size])
        batch = collate([examples[place] for place in group]).to(target.device)
        states = read_states(target.model, batch.input_ids_BT, taps, media=batch.media_inputs(target))
        inside_BT = batch.document_ids_BT != NO_DOCUMENT
        yield group, [state_BTE[inside_BT] for state_BTE in (states.final_BTE, *states.taps_ABTE)]


@torch.no_grad()
def encode(target: Target, layout: RowLayout, states_ANE: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return what is kept of final states, which come first, and of those of the layout's taps, by name, on the CPU."""
    names = ("hidden", *map(tap_name, layout.taps))
    kept = {name: state_NE.to(getattr(torch, layout.dtype)) for name, state_NE in zip(names, states_ANE, strict=True)}
    # Of the state as it will be read: the sum of a rounded one's probabilities is then still 1.
    known = normalise(target.model, kept["hidden"].to(states_ANE[0].dtype), chunk_size=CHUNK_SIZE)
    kept |= {"log_sum": known.log_sum_P.float(), "top1": known.top1_P.int()}
    for name, values in kept.items():
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise InputError(f"dtype: the target's {name} is not finite in {layout.dtype}; try bfloat16")
    return {name: values.cpu() for name, values in kept.items()}


def layout_of(config: CacheConfig, target: PreTrainedModel) -> RowLayout:
    last = num_blocks(target)
    if config.taps and config.taps[-1] > last:
        raise ConfigError(f"taps: expected h_0 (embedding) to h_{last} (last block of the target), got {config.taps}")
    return RowLayout(
        dtype=config.dtype,
        width=target.config.get_text_config().hidden_size,
        taps=config.taps,
        target_dtype=str(target.dtype).removeprefix("torch."),
    )


def check_folder(folder: Path) -> None:
    """Raise `InputError` for a file, or a folder that holds anything but a cache: what lies there may be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output: {folder} is a file; name a folder that is new or holds a target cache")
    others = {path.name for path in folder.glob("*") if not DISPOSABLE.fullmatch(path.name)} - {RECORD, LOCK_FILE}
    if others:
        raise InputError(f"output: {folder} holds {min(others)}, which is no part of a target cache; name a folder of its own")


def check_room(folder: Path, num_bytes: int) -> None:
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(above).free
    if free < num_bytes:
        needed = f"needs {num_bytes / 1e6:.1f} MB more, and its disk has {free / 1e6:.1f} MB free"
        raise InputError(f"output: {folder} {needed}; name a folder elsewhere, or keep fewer taps")


def _file(number: int) -> str:
    return SHARD.format(number=number)


def _job_of(shard: Path) -> str | None:
    """Return the job that made a shard; None where there is no whole one."""
    try:
        with safe_open(shard, framework="pt") as file:
            return made_of(file)[0]
    except (SafetensorError, OSError):
        return None

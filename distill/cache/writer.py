"""Making a target cache: one forward of the target, here or on a server, over each training conversation, kept in a folder.

Conversations are assigned to shards by length alone, and the batches of a shard are made of its own conversations, so a shard's
bytes are the same whoever makes it and however often that was interrupted (a server chooses its own batches and may round
otherwise). Processes take shards by `distill.cache.claims` and wait for each other only before the first. A shard that is
there is finished, and kept by later starts of the same job. The manifest is written last.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import BackgroundWrite, folder_lock
from configs.runtime.resumable import fingerprint
from configs.runtime.run_record import RECORD, write_run_record
from configs.runtime.terminal import progress
from configs.schema.data import CacheConfig
from distill.cache.claims import Claims
from distill.cache.format import (
    CHECKSUMS,
    CONVENTION,
    DISPOSABLE,
    FORMAT_VERSION,
    INDEX,
    INDEX_COLUMNS,
    JOB,
    JOB_OF_SHARD,
    MANIFEST,
    OFFSETS,
    SHARD,
    CacheManifest,
    IndexPiece,
    Places,
    RowLayout,
    as_json,
    check_folder,
    check_room,
)
from distill.cache.rows import engine_rows, local_rows
from distill.cache.storage import Folder
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import Conversation, check_written_for, open_conversations
from distill.server.engine import EngineStates
from heads.frozen.hidden_states import check_taps, num_blocks
from heads.frozen.identity import remembered_sha256
from heads.frozen.loading import Target, load_target
from heads.frozen.processes import from_first, join_processes, naming_lost_processes, share_of

logger = logging.getLogger("draftsmith")

LIST_SECONDS = 10.0  # between looks at what other processes have written


def make_cache(config: CacheConfig) -> None:
    """Make the cache that `config` describes; an interrupted run of the same settings resumes."""
    folder, data_file = Folder(config.output), Path(config.data)
    with ExitStack() as stack:
        check_folder(folder)
        conversations = open_conversations(data_file)
        state = join_processes(config.target, timeout_seconds=config.process_timeout_seconds)
        if state.is_main_process and folder.path is not None and not config.shared:
            stack.enter_context(folder_lock(folder.path))
        with naming_lost_processes():
            target = load_target(config.target, takes_states=True)
            if config.target.states is not None:
                engine = stack.enter_context(closing(EngineStates(config.target.states, target)))
                engine.serve(config.taps or ())
                target = replace(target, states_from=engine)
            for difference in check_written_for(data_file, target.identity):
                logger.warning("%s was written by a target with other %s", data_file, difference)
            sha256 = remembered_sha256(data_file)
            job = CacheJob(target=target, conversations=conversations, config=config, data_sha256=sha256)
            share = share_of(target.group, state)
            if state.is_main_process:
                job.prepare()
            elif share.number == 0:  # holds a part of the main process's target, which `prepare` runs
                check_taps(target.model, job.layout.taps or ())
            state.wait_for_everyone()
        started = time.monotonic()
        job.work(rank=share.number, num_processes=share.count, writes=share.writes)
        if state.is_main_process:
            job.finish()
            job.record(seconds=time.monotonic() - started)  # of this start


@dataclass(frozen=True, kw_only=True)
class CacheJob:
    """A cache to be made by one or several processes."""

    target: Target
    conversations: Sequence[Conversation]
    config: CacheConfig
    data_sha256: str

    def prepare(self) -> None:
        """Delete files of another job and check that there is room for the rest. Called by one process of each start."""
        check_taps(self.target.model, self.layout.taps or ())
        names = sorted(filter(DISPOSABLE.fullmatch, self._folder.names()))
        resumed, finished = self._is_resumed(), self.finished()
        if self._shared and not resumed:
            held = (self._folder.read(name) for name in names if name.startswith("claim-"))
            if any(content is not None and self._claims(0).is_alive(content) for content in held):
                raise InputError(
                    f"output: other processes are making a cache of other settings in {self._folder}; wait until they have "
                    "ended, or name another output"
                )
        row, num_rows = self.layout.bytes_per_row, sum(self._lengths)
        logger.info("target cache: %d bytes a token, %.1f MB in all", row, row * num_rows / 1e6)
        if finished:
            logger.info("%d of %d shards were finished by an earlier run", len(finished), len(self._plan))
        if self._folder.path is not None:
            check_room(self._folder.path, row * (num_rows - self._num_rows(finished)))
        if not resumed:
            self._folder.delete(names)
            self._folder.write(JOB, as_json({"job": self.digest}))
        elif not self._shared:  # else others may be at work, and writing these
            self._folder.delete(name for name in names if name.startswith((".", "claim-")))
        self.record()

    def record(self, **extra: float) -> None:
        """Write what the cache is made with, and further figures, beside it."""
        with tempfile.TemporaryDirectory() as scratch:
            self._folder.write(RECORD, write_run_record(Path(scratch), self.config, **extra).read_bytes())

    def work(self, *, rank: int, num_processes: int, writes: bool = True) -> None:
        """Write shards, those that no other process writes, until all are there.

        Without `writes` this process only computes what the first one of the target's group writes.
        """
        own, write = self._claims(rank * len(self._plan) // num_processes), BackgroundWrite()
        shown, shared, listed = self.finished(), num_processes > 1 or self._shared, time.monotonic()
        with progress("target cache", sum(self._lengths), "tokens", done=self._num_rows(shown)) as advance:

            def show(there: Iterable[int]) -> None:
                advance(self._num_rows(new := set(there) - shown))
                shown.update(new)

            try:
                for number in from_first(self.target.group, own.shards()):
                    tensors = self._shard_tensors(number)
                    if writes:
                        write.start(partial(self._write_shard, own, number, tensors))  # once the one before is there
                        show([number])
                    if shared and rank == 0 and time.monotonic() - listed > LIST_SECONDS:
                        show(self.finished())  # by the others
                        listed = time.monotonic()
            finally:
                write.wait()
            if shared and rank == 0:
                show(self.finished())

    def finished(self) -> set[int]:
        """Return this job's shards that are there, whoever made them."""
        return set(range(len(self._plan))).difference(self._claims(0).missing()) if self._is_resumed() else set()

    def finish(self) -> CacheManifest:
        """Write index and manifest, which complete the cache; `RuntimeError` where a shard is missing."""
        if missing := self._claims(0).missing():
            raise RuntimeError(f"{len(missing)} shards are missing in {self._folder}, the first is {missing[0]}")
        index = save(dict(zip(INDEX_COLUMNS, self._places(), strict=True)))
        self._folder.write(INDEX, index)
        manifest = CacheManifest(
            layout=self.layout,
            target=self.target.identity.to_dict(),
            data_file=self.config.data,
            data_sha256=self.data_sha256,
            max_length=self.config.max_length,
            job=self.digest,
            num_shards=len(self._plan),
            index=[IndexPiece(file=INDEX, sha256=hashlib.sha256(index).hexdigest())],
        )
        self._folder.write(MANIFEST, as_json(manifest.model_dump(mode="json")))
        return manifest

    @cached_property
    def layout(self) -> RowLayout:
        # Rows of the head beyond the tokenizer are padding: no token has those ids, and a draft's head may lack them.
        return layout_of(self.config, self.target.model, min(self.target.vocab_size, len(self.target.tokenizer)))

    @cached_property
    def digest(self) -> str:
        """A hash of all that decides the bytes of the shards."""
        config, settings = self.config, self.config.target
        # target.forward does not count: only decoding runs another than transformers' (`heads.inference.causal_lm`).
        return fingerprint(
            FORMAT_VERSION,
            self.layout.model_dump(),
            self.target.identity.to_dict(),
            ["exact target", settings.dtype, settings.attention],
            self.data_sha256,
            [config.max_length, config.batch_size, config.chunk_size, config.shard_megabytes],
        )

    @cached_property
    def _dataset(self) -> ConversationDataset:
        return ConversationDataset(self.conversations, self.config.max_length)

    @cached_property
    def _lengths(self) -> list[int]:
        return self.layout.num_rows(self._dataset.lengths, self._dataset.answer_starts).tolist()

    @cached_property
    def _plan(self) -> list[range]:
        rows_per_shard = int(self.config.shard_megabytes * 1e6 / self.layout.bytes_per_row)
        return list(plan_shards(self._lengths, rows_per_shard))

    @cached_property
    def _folder(self) -> Folder:
        return Folder(self.config.output)

    @property
    def _shared(self) -> bool:
        """Whether other starts of this job may be at work."""
        return self.config.shared or self._folder.path is None

    def _claims(self, start: int) -> Claims:
        seconds = self.config.claim_seconds
        return Claims(folder=self._folder, num_shards=len(self._plan), claim_seconds=seconds, start=start)

    def _num_rows(self, shards: Iterable[int]) -> int:
        return sum(self._lengths[index] for number in shards for index in self._plan[number])

    def _lengths_in(self, number: int) -> Tensor:
        """Return the rows of each of a shard's conversations, int64 `[C]`."""
        return torch.tensor([self._lengths[index] for index in self._plan[number]])

    def _is_resumed(self) -> bool:
        """Return whether the shards in the folder are this job's."""
        return self._folder.read(JOB) == as_json({"job": self.digest})

    def _write_shard(self, claims: Claims, number: int, tensors: dict[str, Tensor]) -> None:
        """Write a shard and release its claim, while the next one is computed."""
        lengths = self._lengths_in(number)
        parts = [tensors[name].contiguous().split(lengths.tolist()) for name in self.layout.tensors(0)]
        sums = [[zlib.crc32(part.flatten().view(torch.uint8).numpy().data) for part in row] for row in zip(*parts, strict=True)]
        columns = {OFFSETS: lengths.cumsum(0) - lengths, CHECKSUMS: torch.tensor(sums)}
        self._folder.write(SHARD.format(number=number), save(tensors | columns, metadata={JOB_OF_SHARD: self.digest}))
        claims.release(number)

    def _shard_tensors(self, number: int) -> dict[str, Tensor]:
        """Return the rows of a shard's conversations, one conversation after the other."""
        lengths = self._lengths_in(number)
        starts, layout = lengths.cumsum(0) - lengths, self.layout.tensors(int(lengths.sum()))
        tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}
        examples, config = [self._dataset[index] for index in self._plan[number]], self.config
        if self.target.states_from is None:
            sizes = {"batch_size": config.batch_size, "chunk_size": config.chunk_size}
            found = local_rows(self.target, self.layout, examples, **sizes)
        else:
            found = engine_rows(self.target, self.layout, examples, chunk_size=config.chunk_size)
        for group, kept in found:
            rows_N = torch.cat([torch.arange(int(starts[index]), int(starts[index] + lengths[index])) for index in group])
            for name, values in kept.items():
                tensors[name][rows_N] = values
        return tensors

    def _places(self) -> Places:
        places = Places(*torch.zeros(3, len(self.conversations), dtype=torch.int32).unbind())
        lengths = torch.tensor(self._lengths, dtype=torch.int32)
        for number, indices in enumerate(self._plan):
            rows = torch.from_numpy(self._dataset.numbers[indices.start : indices.stop])
            own = lengths[indices.start : indices.stop]
            places.shard_C[rows], places.length_C[rows] = number, own
            places.offset_C[rows] = (own.cumsum(0) - own).int()
        return places


def layout_of(config: CacheConfig, target: PreTrainedModel, vocab_size: int) -> RowLayout:
    """Return what a cache keeps of each row of a target whose distribution is over `vocab_size` tokens."""
    if config.kind == "top_k":
        if config.k > vocab_size:
            raise ConfigError(f"k: expected at most {vocab_size}, the size of the target's vocabulary, got {config.k}")
        return RowLayout(kind="top_k", dtype=config.dtype or "float16", width=config.k, vocab_size=vocab_size)
    taps, last = config.taps, num_blocks(target)
    if taps and taps[-1] > last:
        raise ConfigError(f"taps: expected h_0 (embedding) to h_{last} (last block of the target), got {taps}")
    return RowLayout(
        kind="last_hidden",
        dtype=config.dtype or "bfloat16",
        width=target.config.get_text_config().hidden_size,
        vocab_size=vocab_size,
        taps=taps,
        convention=None if taps is None else CONVENTION,
        target_dtype=None if taps is None else str(target.dtype).removeprefix("torch."),
    )


def plan_shards(lengths: Sequence[int], rows_per_shard: int) -> Iterator[range]:
    """Yield runs of conversations of at most `rows_per_shard` rows together, or of a single longer one."""
    start, rows = 0, 0
    for number, length in enumerate(lengths):
        if number > start and rows + length > rows_per_shard:
            yield range(start, number)
            start, rows = number, 0
        rows += length
    if start < len(lengths):
        yield range(start, len(lengths))

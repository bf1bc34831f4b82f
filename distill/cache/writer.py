"""Making a target cache: one forward of the target, here or on a server, over each training conversation, kept on disk.

Conversations are assigned to shards by length alone, and the batches of a shard are made of its own conversations, so a shard's
bytes are the same however many processes share the work and however often it was interrupted (a server chooses its own batches
and may round otherwise). A finished shard has a record beside it and is kept. The manifest is written last.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from configs.runtime.errors import ConfigError
from configs.runtime.files import folder_lock, read_json, sha256_of, write_bytes, write_json
from configs.runtime.progress import progress
from configs.runtime.resumable import fingerprint
from configs.runtime.run_record import write_run_record
from configs.schema.data import CacheConfig
from distill.cache.format import (
    CONVENTION,
    DISPOSABLE,
    MANIFEST,
    RECORD,
    SHARD,
    CacheManifest,
    ConversationRows,
    RowLayout,
    Server,
    Shard,
    check_folder,
    check_room,
)
from distill.cache.rows import local_rows
from distill.cache.server_rows import check_serves, server_rows
from distill.dataset.batches import ConversationDataset, Example
from distill.dataset.conversations import Conversation, check_written_for, open_conversations
from distill.server.logprobs import TargetServer
from heads.target.hidden_states import check_taps, num_blocks
from heads.target.loading import Target, load_target
from heads.target.processes import join_processes

logger = logging.getLogger("draftsmith")


def make_cache(config: CacheConfig) -> None:
    """Make the cache that `config` describes; goes on where a cut-off run of the same settings stopped.

    Raises:
        InputError: the data, the target or the server cannot be had or do not go together, or the output folder cannot be
            written, holds something else, or lies on a disk without room.
    """
    folder, data_file = Path(config.output), Path(config.data)
    with ExitStack() as stack:
        server = None if config.server is None else stack.enter_context(TargetServer(config.server))
        if server is not None:
            server.check_model()  # before a large target is loaded
        check_folder(folder)
        conversations = open_conversations(data_file)
        state = join_processes(config.target)
        if state.is_main_process:
            stack.enter_context(folder_lock(folder))
        target = load_target(config.target)
        for difference in check_written_for(data_file, target.identity):
            logger.warning("%s was written by a target with other %s", data_file, difference)
        data_sha256 = sha256_of(data_file)
        job = CacheJob(target=target, conversations=conversations, config=config, data_sha256=data_sha256, server=server)
        if state.is_main_process:
            job.prepare()
        state.wait_for_everyone()
        job.work(rank=state.process_index, num_processes=state.num_processes)
        state.wait_for_everyone()
        if state.is_main_process:
            job.finish()
        state.wait_for_everyone()


@dataclass(frozen=True, kw_only=True)
class CacheJob:
    """A cache to be made by one or several processes; without a `server` the local target computes it."""

    target: Target
    conversations: Sequence[Conversation]
    config: CacheConfig
    data_sha256: str
    server: TargetServer | None = None

    def prepare(self) -> None:
        """Delete shards that cannot be used and check that there is room for the rest. Called by one process.

        Raises:
            ConfigError: `k` is larger than the vocabulary, or a tap lies behind the last block.
            InputError: the folder cannot be written, the disk has too little room, the target's taps do not lead to its
                logits, or the server does not serve the target.
        """
        check_taps(self.target.model, self.layout.taps or ())
        finished = {
            number: shard for number, shard in self.finished().items() if sha256_of(self._folder / shard.file) == shard.sha256
        }
        sizes = [self.layout.bytes_per_row * self._num_rows(number) for number in range(len(self._plan))]
        logger.info("target cache: %d bytes a token, %.1f MB in all", self.layout.bytes_per_row, sum(sizes) / 1e6)
        if finished:
            logger.info("%d of %d shards were finished by an earlier run", len(finished), len(self._plan))
        check_room(self._folder, sum(size for number, size in enumerate(sizes) if number not in finished))
        if self.server is not None:
            check_serves(self.server, self.target, self.layout, self._dataset[0])
        kept = {name for number in finished for name in (SHARD.format(number=number), RECORD.format(number=number))}
        for path in [path for pattern in DISPOSABLE for path in self._folder.glob(pattern) if path.name not in kept]:
            path.unlink()
        write_run_record(self._folder, self.config)

    def work(self, *, rank: int, num_processes: int) -> None:
        """Write this process's share of the shards, all but those finished before.

        Raises:
            InputError: a value is not finite, the server fails, or a shard cannot be written.
        """
        mine = range(rank, len(self._plan), num_processes)
        finished = self.finished()
        with progress("target cache", sum(map(self._num_rows, mine)), "tokens") as advance:
            for number in mine:
                if number not in finished:
                    self._write_shard(number)
                advance(self._num_rows(number))

    def finished(self) -> dict[int, Shard]:
        """Return this job's shards on disk, by number, whichever process wrote them."""
        noted = {number: self._noted(number) for number in range(len(self._plan))}
        return {number: shard for number, shard in noted.items() if shard is not None}

    def finish(self) -> CacheManifest:
        """Write the manifest, which completes the cache. Called by one process.

        Raises:
            RuntimeError: a shard is missing, so a process has not finished.
        """
        finished = self.finished()
        missing = [number for number in range(len(self._plan)) if number not in finished]
        if missing:
            raise RuntimeError(f"{len(missing)} shards are missing in {self._folder}, the first is {missing[0]}")
        manifest = CacheManifest(
            layout=self.layout,
            target=self.target.identity.to_dict(),
            server=None if self.server is None else Server(url=self.server.config.url, model=self.server.config.model),
            data_file=self.config.data,
            data_sha256=self.data_sha256,
            max_length=self.config.max_length,
            shards=[finished[number] for number in range(len(self._plan))],
            conversations=self._places(),
        )
        write_json(self._folder / MANIFEST, manifest.model_dump(mode="json"))
        return manifest

    @cached_property
    def layout(self) -> RowLayout:
        """What is kept of each row; for errors see `layout_of`."""
        # Rows of the head beyond the tokenizer are padding: no token has those ids, and a draft's head may lack them.
        return layout_of(self.config, self.target.model, min(self.target.vocab_size, len(self.target.tokenizer)))

    @cached_property
    def digest(self) -> str:
        """A hash of all that decides the bytes of the shards."""
        config, settings = self.config, self.config.target
        # A server counts by its model, not its address: one that moved is checked again, and the job goes on.
        # target.forward does not count: only decoding runs another than transformers' (`heads.inference.causal_lm`).
        writer = [] if self.server is None else [["server", self.server.config.model]]
        return fingerprint(
            self.layout.model_dump(),
            self.target.identity.to_dict(),
            [settings.dtype, settings.attention],
            self.data_sha256,
            [config.max_length, config.batch_size, config.chunk_size, config.shard_megabytes],
            *writer,
        )

    @cached_property
    def _dataset(self) -> ConversationDataset:
        return ConversationDataset(self.conversations, self.config.max_length)

    @cached_property
    def _lengths(self) -> list[int]:
        """How many rows each example has."""
        dataset = self._dataset
        pairs = zip(dataset.lengths.tolist(), dataset.answer_starts.tolist(), strict=True)
        return [self.layout.num_rows(length, start) for length, start in pairs]

    @cached_property
    def _plan(self) -> list[range]:
        """Which examples each shard holds."""
        rows_per_shard = int(self.config.shard_megabytes * 1e6 / self.layout.bytes_per_row)
        return list(plan_shards(self._lengths, rows_per_shard))

    @property
    def _folder(self) -> Path:
        return Path(self.config.output)

    def _num_rows(self, number: int) -> int:
        """Return how many rows a shard has."""
        return sum(self._lengths[index] for index in self._plan[number])

    def _noted(self, number: int) -> Shard | None:
        """Return a finished shard by its record; None where this job has not finished it."""
        record = self._folder / RECORD.format(number=number)
        if not (record.is_file() and (self._folder / SHARD.format(number=number)).is_file()):
            return None
        noted = read_json(record, "record of a target cache's shard")
        if not isinstance(noted, dict) or noted.get("job") != self.digest or not isinstance(noted.get("sha256"), str):
            return None
        return Shard(file=SHARD.format(number=number), sha256=noted["sha256"], num_rows=self._num_rows(number))

    def _write_shard(self, number: int) -> None:
        """Write one shard, then its record, which marks it as finished."""
        content = save(self._shard_tensors([self._dataset[index] for index in self._plan[number]]))
        write_bytes(self._folder / SHARD.format(number=number), content)
        record = {"job": self.digest, "sha256": hashlib.sha256(content).hexdigest()}
        write_json(self._folder / RECORD.format(number=number), record)

    def _shard_tensors(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return the rows of a shard's conversations, one conversation after the other."""
        lengths = torch.tensor([self.layout.num_rows(len(each.input_ids), each.answer_start) for each in examples])
        starts = lengths.cumsum(0) - lengths
        tensors = {
            name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in self.layout.tensors(int(lengths.sum())).items()
        }
        for group, kept in self._rows(examples):
            rows_N = torch.cat([torch.arange(int(starts[index]), int(starts[index] + lengths[index])) for index in group])
            for name, values in kept.items():
                tensors[name][rows_N] = values
        return tensors

    def _rows(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yield indices of examples, and their rows, from the server or the local target."""
        if self.server is not None:
            rows = server_rows(self.server, self.layout, examples)
            return (([index], kept) for index, kept in enumerate(rows))
        config = self.config
        return local_rows(self.target, self.layout, examples, batch_size=config.batch_size, chunk_size=config.chunk_size)

    def _places(self) -> list[ConversationRows]:
        """Return where each conversation of the data file lies."""
        rows: dict[int, tuple[int, int, int]] = {}
        for number, indices in enumerate(self._plan):
            offset = 0
            for index in indices:
                length = self._lengths[index]
                rows[int(self._dataset.numbers[index])] = (number, offset, length)
                offset += length
        places = []
        for index, row in enumerate(self.conversations):
            shard, offset, length = rows.get(index, (0, 0, 0))
            places.append(ConversationRows(prompt_id=row.prompt_id, turn=row.turn, shard=shard, offset=offset, length=length))
        return places


def layout_of(config: CacheConfig, target: PreTrainedModel, vocab_size: int) -> RowLayout:
    """Return what a cache keeps of each row of a target whose distribution is over `vocab_size` tokens.

    Raises:
        ConfigError: `k` is larger than the vocabulary, or a tap lies behind the last block.
    """
    if config.kind == "top_k" and config.k > vocab_size:
        raise ConfigError(f"k: expected at most {vocab_size}, the size of the target's vocabulary, got {config.k}")
    if config.kind == "top_k":
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

"""Making a target cache: one forward of the target over each training conversation, kept on disk.

Conversations are dealt to shards by length alone, before any process takes its part, and the batches of a shard are made of
its own conversations. A shard's bytes are therefore the same however many processes share the work and however often it was
cut off; a finished one is known by the small file beside it and kept. The manifest comes last: a cache without it is none.
N rows, E width of the target.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from configs.errors import ConfigError, InputError
from configs.files import read_json, sha256_of, write_bytes, write_json
from configs.progress import progress
from configs.provenance import write_run_record
from configs.schema import CacheConfig
from distill.batches import Batch, ConversationDataset, Example, collate
from distill.cache_format import MANIFEST, RECORD, SHARD, Layout, Manifest, Place, Shard
from distill.cache_rows import encode
from distill.conversations import Conversation, check_written_for, read_conversations
from distill.objective import target_hidden
from distill.partial import fingerprint
from distill.processes import join_processes
from distill.target import Target, load_target

logger = logging.getLogger("draftsmith")

# What a run may leave behind, scratch files of a killed one among it, and what it may throw away.
DISPOSABLE = (MANIFEST, "shard-[0-9]*.safetensors", "shard-[0-9]*.json", ".shard-[0-9]*", f".{MANIFEST}.*", ".run.json.*")
OURS = (*DISPOSABLE, "run.json")


def make_cache(config: CacheConfig) -> None:
    """Make the cache that `config` describes; goes on where a cut-off run of the same settings stopped.

    Raises:
        InputError: the data or the target cannot be had or do not go together, or the output folder cannot be written,
            holds something else, or lies on a disk without room.
    """
    data_file, folder = Path(config.data), Path(config.output)
    check_folder(folder)
    conversations = read_conversations(data_file)
    state = join_processes(config.target)
    target = load_target(config.target)
    for difference in check_written_for(data_file, target.identity):
        logger.warning("%s was written by a target with other %s", data_file, difference)
    job = CacheJob(target=target, conversations=conversations, config=config, data_sha256=sha256_of(data_file))
    if state.is_main_process:
        job.prepare()
    state.wait_for_everyone()
    job.work(rank=state.process_index, num_processes=state.num_processes)
    state.wait_for_everyone()
    if state.is_main_process:
        job.finish()
    state.wait_for_everyone()


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
            "elsewhere, or keep less (kind: top_k)"
        )


@dataclass(frozen=True, kw_only=True)
class CacheJob:
    """A cache to be made by one or several processes.

    Args:
        target: whose words are kept.
        conversations: all rows of the data file.
        config: the command's config.
        data_sha256: hash of the data file.
    """

    target: Target
    conversations: Sequence[Conversation]
    config: CacheConfig
    data_sha256: str

    def prepare(self) -> None:
        """Drop what cannot be used of what lies in the folder, and see that there is room for the rest. One process does it.

        Raises:
            ConfigError: `k` is larger than the vocabulary.
            InputError: the folder cannot be written, or the disk has too little room.
        """
        finished = {number: shard for number, shard in self.finished().items() if self._is_whole(shard)}
        sizes = [self.layout.bytes_per_row * self._num_rows(number) for number in range(len(self._plan))]
        logger.info("target cache: %d bytes a token, %.1f MB in all", self.layout.bytes_per_row, sum(sizes) / 1e6)
        if finished:
            logger.info("%d of %d shards were finished by an earlier run", len(finished), len(self._plan))
        check_room(self._folder, sum(size for number, size in enumerate(sizes) if number not in finished))
        kept = {name for number in finished for name in (_shard_name(number), _record_name(number))}
        for path in [path for pattern in DISPOSABLE for path in self._folder.glob(pattern) if path.name not in kept]:
            path.unlink()
        write_run_record(self._folder, self.config)

    def work(self, *, rank: int, num_processes: int) -> None:
        """Write this process's share of the shards, all but those finished before.

        Raises:
            InputError: the target's hidden states or logits are not finite, or a shard cannot be written.
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

    def finish(self) -> Manifest:
        """Write the manifest, and with it make the folder a cache. One process does it.

        Raises:
            RuntimeError: a shard is missing, so a process has not finished.
        """
        finished = self.finished()
        missing = [number for number in range(len(self._plan)) if number not in finished]
        if missing:
            raise RuntimeError(f"{len(missing)} shards are missing in {self._folder}, the first is {missing[0]}")
        manifest = Manifest(
            layout=self.layout,
            target=self.target.identity.to_dict(),
            data_file=self.config.data,
            data_sha256=self.data_sha256,
            max_length=self.config.max_length,
            shards=[finished[number] for number in range(len(self._plan))],
            conversations=self._places(),
        )
        write_json(self._folder / MANIFEST, manifest.model_dump(mode="json"))
        return manifest

    @cached_property
    def layout(self) -> Layout:
        """What is kept of each row.

        Raises:
            ConfigError: `k` is larger than the vocabulary.
        """
        # Rows of the head beyond the tokenizer are padding: no token has those ids, and a draft's head may lack them.
        vocab_size = min(self.target.vocab_size, len(self.target.tokenizer))
        if self.config.kind == "top_k" and self.config.k > vocab_size:
            raise ConfigError(f"k: expected at most {vocab_size}, the size of the target's vocabulary, got {self.config.k}")
        if self.config.kind == "top_k":
            return Layout(kind="top_k", dtype=self.config.dtype or "float16", width=self.config.k, vocab_size=vocab_size)
        width = self.target.model.config.get_text_config().hidden_size
        return Layout(kind="last_hidden", dtype=self.config.dtype or "bfloat16", width=width, vocab_size=vocab_size)

    @cached_property
    def digest(self) -> str:
        """A hash of all that decides the bytes of the shards."""
        config, settings = self.config, self.config.target
        return fingerprint(
            self.layout.model_dump(),
            self.target.identity.to_dict(),
            [settings.dtype, settings.attention],
            self.data_sha256,
            [config.max_length, config.batch_size, config.chunk_size, config.shard_megabytes],
        )

    @cached_property
    def _examples(self) -> list[Example]:
        return ConversationDataset(self.conversations, self.config.max_length).examples

    @cached_property
    def _plan(self) -> list[range]:
        """Which examples each shard holds."""
        rows_per_shard = int(self.config.shard_megabytes * 1e6 / self.layout.bytes_per_row)
        return list(plan_shards([_num_labels(example) for example in self._examples], rows_per_shard))

    @property
    def _folder(self) -> Path:
        return Path(self.config.output)

    def _num_rows(self, number: int) -> int:
        """Return how many rows a shard has."""
        return sum(_num_labels(self._examples[index]) for index in self._plan[number])

    def _noted(self, number: int) -> Shard | None:
        """Return a shard that its record says this job has finished; None without such a record."""
        record = self._folder / _record_name(number)
        if not (record.is_file() and (self._folder / _shard_name(number)).is_file()):
            return None
        noted = read_json(record, "record of a target cache's shard")
        if not isinstance(noted, dict) or noted.get("job") != self.digest:
            return None
        return Shard(file=_shard_name(number), sha256=noted["sha256"], num_rows=self._num_rows(number))

    def _is_whole(self, shard: Shard) -> bool:
        return sha256_of(self._folder / shard.file) == shard.sha256

    def _write_shard(self, number: int) -> None:
        """Write one shard, then the record beside it that says it is finished."""
        content = save(self._shard_tensors([self._examples[index] for index in self._plan[number]]))
        write_bytes(self._folder / _shard_name(number), content)
        record = {"job": self.digest, "sha256": hashlib.sha256(content).hexdigest()}
        write_json(self._folder / _record_name(number), record)

    def _shard_tensors(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return the tensors of a shard: the rows of its conversations, one conversation after the other."""
        lengths = torch.tensor([_num_labels(example) for example in examples])
        starts = lengths.cumsum(0) - lengths
        tensors = {
            name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in self.layout.tensors(int(lengths.sum())).items()
        }
        for group in _by_length(examples, self.config.batch_size):
            batch = Batch(*(tensor.to(self.target.device) for tensor in collate([examples[index] for index in group])))
            hidden_NE = target_hidden(self.target, batch)[:, :-1][batch.loss_mask_BT[:, 1:]]
            rows_N = torch.cat([torch.arange(int(starts[index]), int(starts[index] + lengths[index])) for index in group])
            for name, values in encode(self.target, self.layout, hidden_NE, self.config.chunk_size).items():
                tensors[name][rows_N] = values
        return tensors

    def _places(self) -> list[Place]:
        """Return where each conversation of the data file lies."""
        rows: dict[int, tuple[int, int, int]] = {}
        for number, indices in enumerate(self._plan):
            offset = 0
            for index in indices:
                example = self._examples[index]
                rows[example.conversation] = (number, offset, _num_labels(example))
                offset += _num_labels(example)
        places = []
        for index, row in enumerate(self.conversations):
            shard, offset, length = rows.get(index, (0, 0, 0))
            places.append(Place(prompt_id=row.prompt_id, turn=row.turn, shard=shard, offset=offset, length=length))
        return places


def plan_shards(lengths: Sequence[int], rows_per_shard: int) -> Iterator[range]:
    """Yield runs of conversations of at most `rows_per_shard` rows together, or of a single longer one.

    Args:
        lengths: rows by conversation.
        rows_per_shard: most rows of a shard that holds several conversations.
    """
    start, rows = 0, 0
    for number, length in enumerate(lengths):
        if number > start and rows + length > rows_per_shard:
            yield range(start, number)
            start, rows = number, 0
        rows += length
    if start < len(lengths):
        yield range(start, len(lengths))


def _by_length(examples: Sequence[Example], batch_size: int) -> Iterator[list[int]]:
    """Yield batches of places in `examples`, those of similar length together: padding is work thrown away."""
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].input_ids))
    for start in range(0, len(order), batch_size):
        yield sorted(order[start : start + batch_size])


def _num_labels(example: Example) -> int:
    """Return how many of an example's tokens are labels."""
    return len(example.input_ids) - example.answer_start


def _shard_name(number: int) -> str:
    return SHARD.format(number=number)


def _record_name(number: int) -> str:
    return RECORD.format(number=number)

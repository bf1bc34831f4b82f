"""Conversations as training batches: token ids, which of them are labels, positions, and documents.

The order of an epoch depends on (seed, epoch) alone, so that a resumed run sees the batches of an uninterrupted one, whatever
the number of processes. To reduce padding, conversations of similar length share a batch. Those of a step of several batches
are balanced over them (`balanced`), so that no process waits for one with long rows.
Packing puts several conversations into one row, for models that keep the documents of a row apart
(`heads.inference.model_checks`). Rows are filled once, by first-fit decreasing within windows of shuffled conversations, none
of which is ever cut in two; their contents depend on the seed alone, the order of the rows on (seed, epoch).
B batch, T positions, C conversations of a row at most, N conversations, R rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from configs.runtime.errors import InputError
from distill.dataset.conversations import Conversation, index_of
from heads.frozen.media import MediaPrompt
from heads.modules.interface import NO_DOCUMENT, Batch, BatchMedia

Item = TypeVar("Item")  # a batch is a list of these: indices of conversations, or rows of them
# Least number of conversations that are packed together, where there are so many. A larger window packs no better: 4,096
# conversations leave as much padding.
WINDOW = 2048

Row = tuple[int, ...]  # indices of the conversations in it


class Example(NamedTuple):
    """One conversation to train on: its ids, of which those from `answer_start` on are the target's."""

    input_ids: tuple[int, ...]
    answer_start: int
    conversation: int = 0  # its place in the data file
    media_prompt: MediaPrompt | None = None  # of a prompt with images or sounds


class ConversationDataset(Dataset[Example]):
    """Conversations cut at `max_length` tokens; those without an answer token before the cut are dropped and counted.

    With `num_conversations` they are so many of all, drawn by a fixed seed. Only indices and lengths are in memory; the tokens
    of a `ConversationFile` are read on access.
    """

    def __init__(self, conversations: Sequence[Conversation], max_length: int, num_conversations: int | None = None) -> None:
        self.conversations, self.max_length = conversations, max_length
        drawn = np.arange(len(conversations))
        if num_conversations is not None:
            if num_conversations > len(drawn):
                raise InputError(f"data.num_conversations: {num_conversations}, and data.train has {len(drawn)}")
            drawn = np.sort(np.random.default_rng(0).permutation(drawn)[:num_conversations])
        index = index_of(conversations)
        prompts_N, cut_N = index.prompt_lengths, np.minimum(index.prompt_lengths + index.answer_lengths, max_length)
        self.numbers = drawn[(prompts_N < cut_N)[drawn]]  # places in the data file
        self.lengths, self.answer_starts = cut_N[self.numbers], prompts_N[self.numbers]
        self.num_dropped = len(drawn) - len(self.numbers)
        if not len(self.numbers):
            raise InputError(f"data.max_length: none of {len(drawn)} conversations has an answer token within {max_length}")

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Example:
        number = int(self.numbers[index])
        row = self.conversations[number]
        ids = (row.prompt_ids + row.answer_ids)[: self.max_length]
        return Example(ids, len(row.prompt_ids), number, row.media_prompt)

    @property
    def num_labels(self) -> int:
        return int((self.lengths - self.answer_starts).sum())


class EpochSampler(Sampler[list[Item]]):
    """Batches in an order that depends on (seed, epoch) alone; a shorter last one stays last, as accelerate expects."""

    drop_last = False  # read by accelerate

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def sampler(self) -> EpochSampler[Item]:
        """This sampler: with several processes accelerate wraps it, and passes epochs on to `.sampler` only."""
        return self

    def random_numbers(self) -> torch.Generator:
        """Return the random numbers of the current epoch. (Not called `generator`, an attribute that accelerate reads.)"""
        return torch.Generator().manual_seed(((self.seed << 20) + self.epoch) % 2**63)


class BucketedBatchSampler(EpochSampler[int]):
    """Batches of indices: shuffled, sorted by length within windows of `window` batches, and shuffled as batches.

    A batch has `rows` of them; `num_batches` are those of an optimiser step over all processes, and then have as many on
    average. Where the last step of an epoch has fewer conversations, it takes more of those that began it, or it would be
    another step with another number of processes.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, rows: int, *, seed: int, window: int = 16, num_batches: int = 1
    ) -> None:
        super().__init__(seed)
        self.lengths_N = torch.as_tensor(lengths, dtype=torch.int32)
        self.rows = rows
        self.batch_size = rows if num_batches == 1 else None  # accelerate fills the last batches up to it
        self.window = window
        self.num_batches = num_batches

    def __len__(self) -> int:
        return math.ceil(len(self.lengths_N) / (self.num_batches * self.rows)) * self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        buckets, first = self._buckets(), list[int]()
        if self.num_batches == 1:
            yield from buckets
            return
        while step := [index for bucket in islice(buckets, self.num_batches) for index in bucket]:
            first = first or step
            step += list(islice(cycle(first), max(0, self.num_batches - len(step))))
            yield from balanced(step, self.lengths_N[step].tolist(), self.num_batches)

    def _buckets(self) -> Iterator[list[int]]:
        generator = self.random_numbers()
        order_N = torch.randperm(len(self.lengths_N), generator=generator)
        num_full = len(order_N) // self.rows
        full_N, rest_N = order_N.split([num_full * self.rows, len(order_N) - num_full * self.rows])
        for part_N in full_N.split(self.window * self.rows):
            part_N.copy_(part_N[self.lengths_N[part_N].argsort(stable=True)])
        for number in torch.randperm(num_full, generator=generator).numpy():  # a tensor would become a list of tensors
            yield full_N[number * self.rows : (number + 1) * self.rows].tolist()
        if len(rest_N):
            yield rest_N.tolist()


def balanced(rows: Sequence[int], lengths: Sequence[int], num_batches: int) -> list[list[int]]:
    """Return the rows as so many batches (fewer where there are fewer rows) of about as many positions each.

    Rows of similar length share a batch, so that it has more of the shorter ones; the largest number of positions is the least
    that batches of neighbours in the order of lengths can have.
    """
    order = sorted(range(len(rows)), key=lambda place: -lengths[place])
    rows, lengths = [rows[place] for place in order], [lengths[place] for place in order]
    num_batches = min(num_batches, len(rows))

    def sizes(limit: int) -> list[int]:
        """Return how many rows each batch takes under a limit of positions, and at the end how many are left."""
        taken, done = [], 0
        for left in range(num_batches - 1, -1, -1):
            taken.append(min(limit // lengths[done], len(rows) - done - left))
            done += taken[-1]
        return [*taken, len(rows) - done]

    limits = range(lengths[0], lengths[0] * len(rows) + 1)
    limit = limits[bisect_left(limits, True, key=lambda each: sizes(each)[-1] == 0)]
    taken = iter(rows)
    return [list(islice(taken, size)) for size in sizes(limit)[:-1]]


def make_loader(dataset: ConversationDataset, batch_size: int, *, seed: int, num_batches: int = 1) -> DataLoader[Batch]:
    """Return a loader that accelerate can prepare; call `set_epoch` on its `batch_sampler` (or on the prepared loader)."""
    return loader_of(dataset, BucketedBatchSampler(dataset.lengths, batch_size, seed=seed, num_batches=num_batches), collate)


def loader_of(
    dataset: Dataset[Any], sampler: EpochSampler[Item], collate: Callable[[Sequence[Any]], Batch]
) -> DataLoader[Batch]:
    """Return a loader of the sampler's batches; see `make_loader`."""
    # A generator of its own: without one a loader draws from torch's at each epoch, which changes the draws of a resumed run.
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, generator=torch.Generator())


class Document(NamedTuple):
    """A conversation in a batch: positions `start` to `end` (without it) of a row, and its place in the data file."""

    row: int
    start: int
    end: int
    conversation: int


def documents_of(batch: Batch) -> Iterator[Document]:
    host = batch.on_host
    for row, (documents_T, conversations_C) in enumerate(zip(host.document_ids_BT, host.conversations_BC, strict=True)):
        counts_C = documents_T[documents_T != NO_DOCUMENT].bincount(minlength=len(conversations_C))
        start = 0
        for length, conversation in zip(counts_C.tolist(), conversations_C.tolist(), strict=True):
            if length:
                yield Document(row, start, start + length, conversation)
                start += length


def collate(examples: Sequence[Example]) -> Batch:
    lengths_B1 = torch.tensor([[len(example.input_ids)] for example in examples])
    answer_starts_B1 = torch.tensor([[example.answer_start] for example in examples])
    T = int(lengths_B1.max())
    positions_BT = torch.arange(T).expand(len(examples), T)
    inside_BT = positions_BT < lengths_B1
    return Batch(
        input_ids_BT=torch.tensor([[*example.input_ids, *[0] * (T - len(example.input_ids))] for example in examples]),
        loss_mask_BT=inside_BT & (positions_BT >= answer_starts_B1),
        position_ids_BT=positions_BT.contiguous(),
        document_ids_BT=torch.where(inside_BT, 0, NO_DOCUMENT),
        conversations_BC=torch.tensor([[example.conversation] for example in examples]),
        media=BatchMedia.of([example.media_prompt for example in examples]),
    )


# --- packed rows


class PackedBatchSampler(EpochSampler[Row]):
    """Batches of rows, each the indices of the conversations in it; `window` conversations are packed together."""

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, batch_size: int, *, pack_length: int, seed: int, window: int = WINDOW
    ) -> None:
        super().__init__(seed)
        self.batch_size = batch_size
        self._order_N, self._starts_R = _pack(np.asarray(lengths, dtype=np.int32), pack_length, seed, window)

    @property
    def num_rows(self) -> int:
        return len(self._starts_R) - 1

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[list[Row]]:
        order_R = torch.randperm(self.num_rows, generator=self.random_numbers()).numpy()
        for start in range(0, self.num_rows, self.batch_size):
            numbers = order_R[start : start + self.batch_size]
            yield [tuple(self._order_N[self._starts_R[each] : self._starts_R[each + 1]].tolist()) for each in numbers]


class PackedDataset(Dataset[list[Example]]):
    """Rows of conversations by the indices of these."""

    def __init__(self, dataset: ConversationDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, row: Row) -> list[Example]:
        return [self.dataset[index] for index in row]


def make_packed_loader(dataset: ConversationDataset, batch_size: int, *, pack_length: int, seed: int) -> DataLoader[Batch]:
    """Return a loader of rows of `pack_length` tokens; as `distill.dataset.batches.make_loader` but for these."""
    sampler = PackedBatchSampler(dataset.lengths, batch_size, pack_length=pack_length, seed=seed)
    return loader_of(PackedDataset(dataset), sampler, collate_packed)


def collate_packed(rows: Sequence[Sequence[Example]]) -> Batch:
    B, T, C = len(rows), max(sum(len(each.input_ids) for each in row) for row in rows), max(map(len, rows))
    batch = Batch(
        input_ids_BT=torch.zeros(B, T, dtype=torch.int64),
        loss_mask_BT=torch.zeros(B, T, dtype=torch.bool),
        position_ids_BT=torch.zeros(B, T, dtype=torch.int64),
        document_ids_BT=torch.full((B, T), NO_DOCUMENT),
        conversations_BC=torch.full((B, C), NO_DOCUMENT),
    )
    for number, examples in enumerate(rows):
        _fill(batch, number, examples)
    return batch


def _fill(batch: Batch, row: int, examples: Sequence[Example]) -> None:
    start = 0
    for document, example in enumerate(examples):
        if example.media_prompt is not None:
            raise InputError(f"data.packing: conversation {example.conversation} brings images or sounds; set it to null")
        end = start + len(example.input_ids)
        batch.input_ids_BT[row, start:end] = torch.tensor(example.input_ids)
        batch.loss_mask_BT[row, start + example.answer_start : end] = True
        batch.position_ids_BT[row, start:] = torch.arange(batch.position_ids_BT.shape[1] - start)  # overwritten by the next one
        batch.document_ids_BT[row, start:end] = document
        batch.conversations_BC[row, document] = example.conversation
        start = end


def _pack(lengths_N: np.ndarray, pack_length: int, seed: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return conversations row after row, `[N]`, and where each row begins among them, `[R + 1]`."""
    shuffled_N = torch.randperm(len(lengths_N), generator=torch.Generator().manual_seed(seed)).numpy()
    order, counts = [], []
    for part in np.array_split(shuffled_N, max(1, len(shuffled_N) // window)):
        part = part[np.argsort(-lengths_N[part], kind="stable")]
        rows = first_fit(lengths_N[part], pack_length)
        order.append(part[np.argsort(rows, kind="stable")])
        counts.append(np.bincount(rows))
    return np.concatenate(order), np.concatenate([[0], np.cumsum(np.concatenate(counts))])


def first_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """Return the row of each length, from 0: the first that still has room for it.

    Falling lengths leave at most 11/9 of the least possible number of rows and 6/9 (Dosa 2007).
    """
    left = np.full(len(lengths), room)
    rows = np.empty(len(lengths), dtype=np.int64)
    for place, length in enumerate(lengths):
        rows[place] = row = (left >= length).argmax()
        left[row] -= length
    return rows

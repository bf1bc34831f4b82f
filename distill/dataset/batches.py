"""Conversations as training batches: token ids, which of them are labels, positions, and documents.

The order of an epoch depends on (seed, epoch) alone, so that a resumed run sees the batches of an uninterrupted one, whatever
the number of processes. To reduce padding, conversations of similar length share a batch, and an optimiser step.
Packing puts several conversations into one row, for models that keep the documents of a row apart
(`heads.inference.model_checks`). Rows are filled once, by first-fit decreasing within windows of shuffled conversations, none
of which is ever cut in two; their contents depend on the seed alone, the order of the rows on (seed, epoch).
B batch, T positions, C conversations of a row at most, N conversations, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
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
    """One conversation to train on: its ids, of which those from `answer_start` on, and `earlier` spans, are the target's."""

    input_ids: tuple[int, ...]
    answer_start: int
    conversation: int = 0  # its place in the data file
    media_prompt: MediaPrompt | None = None  # of a prompt with images or sounds
    earlier: tuple[tuple[int, int], ...] = ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where the target's own tokens lie, answer by answer."""
        return *self.earlier, (self.answer_start, len(self.input_ids))

    def up_to(self, length: int) -> Example:
        """Return what is left of it within `length` tokens, up to the last token of the target's own; that is one at least."""
        *earlier, (start, end) = [(start, min(end, length)) for start, end in self.spans if start < length]
        return self._replace(input_ids=self.input_ids[:end], answer_start=start, earlier=tuple(earlier))


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
        is_cut_N = index.lengths > max_length
        ends_N, starts_N, num_labels_N = index.by_row(max_length)
        self.numbers = drawn[ends_N[drawn] > 0]  # places in the data file
        self.lengths, self.answer_starts = ends_N[self.numbers], starts_N[self.numbers]  # of the last answer in each
        self.num_labels = int(num_labels_N[self.numbers].sum())
        self.num_dropped = len(drawn) - len(self.numbers)
        self.num_cut = int(is_cut_N[self.numbers].sum())
        if not len(self.numbers):
            raise InputError(f"data.max_length: none of {len(drawn)} conversations has an answer token within {max_length}")

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Example:
        number = int(self.numbers[index])
        row = self.conversations[number]
        whole = Example(row.prompt_ids + row.answer_ids, len(row.prompt_ids), number, row.media_prompt, row.earlier)
        return whole.up_to(self.max_length)


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
    """Batches of indices: shuffled, sorted by length within windows, and shuffled as steps of `num_batches` batches.

    A batch has `rows` of them; `num_batches` are those of an optimiser step over all processes, of about as many positions
    each, so that no process waits for one with long rows. Where the last step of an epoch has fewer conversations than
    batches, it takes more of those that began it.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, rows: int, *, seed: int, window: int = 16, num_batches: int = 1
    ) -> None:
        super().__init__(seed)
        self.lengths_N = torch.as_tensor(lengths, dtype=torch.int32)
        self.batch_size = rows if num_batches == 1 else None  # accelerate fills the last batches up to it
        self.window, self.num_batches = window, num_batches
        self._rows_of_step = num_batches * rows

    def __len__(self) -> int:
        return math.ceil(len(self.lengths_N) / self._rows_of_step) * self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        first = list[int]()
        for step in self._steps():
            first = first or step
            step += islice(cycle(first), max(0, self.num_batches - len(step)))
            yield from (step[number :: self.num_batches] for number in range(self.num_batches))

    def _steps(self) -> Iterator[list[int]]:
        generator, rows = self.random_numbers(), self._rows_of_step
        order_N = torch.randperm(len(self.lengths_N), generator=generator)
        num_full = len(order_N) // rows
        full_N, rest_N = order_N.split([num_full * rows, len(order_N) - num_full * rows])
        for part_N in full_N.split(self.window * rows):
            part_N.copy_(part_N[self.lengths_N[part_N].argsort(stable=True)])
        for number in torch.randperm(num_full, generator=generator).numpy():  # a tensor would become a list of tensors
            yield full_N[number * rows : (number + 1) * rows].tolist()
        if len(rest_N):
            yield rest_N.tolist()


def make_loader(
    dataset: ConversationDataset, batch_size: int, *, seed: int, num_batches: int = 1, pack_length: int | None = None
) -> DataLoader[Batch]:
    """Return a loader of batches, or of packed rows of `pack_length` tokens, that accelerate can prepare.

    Call `set_epoch` on its `batch_sampler` (or on the prepared loader). `num_batches`: those of an optimiser step.
    """
    # A generator of its own: without one a loader draws from torch's at each epoch, which changes the draws of a resumed run.
    generator = torch.Generator()
    rows: Dataset[Any] = dataset if pack_length is None else PackedDataset(dataset)
    if pack_length is None:
        buckets = BucketedBatchSampler(dataset.lengths, batch_size, seed=seed, num_batches=num_batches)
        return DataLoader(rows, batch_sampler=buckets, collate_fn=collate, generator=generator)
    packed = PackedBatchSampler(dataset.lengths, batch_size, pack_length=pack_length, seed=seed)
    return DataLoader(rows, batch_sampler=packed, collate_fn=collate_packed, generator=generator)


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
    """Return a batch of rows of one conversation each, the media of their prompts with them."""
    media = BatchMedia.of([example.media_prompt for example in examples])
    return _collate_rows([[example] for example in examples])._replace(media=media)


def _collate_rows(rows: Sequence[Sequence[Example]]) -> Batch:
    """Return a batch of rows of one conversation after the other: here alone a conversation becomes ids and labels."""
    B, T, C = len(rows), max(sum(len(each.input_ids) for each in row) for row in rows), max(map(len, rows))
    batch = Batch(
        input_ids_BT=torch.zeros(B, T, dtype=torch.int64),
        loss_mask_BT=torch.zeros(B, T, dtype=torch.bool),
        position_ids_BT=torch.zeros(B, T, dtype=torch.int64),
        document_ids_BT=torch.full((B, T), NO_DOCUMENT),
        conversations_BC=torch.full((B, C), NO_DOCUMENT),
    )
    for row, examples in enumerate(rows):
        start = 0
        for document, example in enumerate(examples):
            end = start + len(example.input_ids)
            batch.input_ids_BT[row, start:end] = torch.tensor(example.input_ids)
            for first, after in example.spans:
                batch.loss_mask_BT[row, start + first : start + after] = True
            batch.position_ids_BT[row, start:] = torch.arange(T - start)  # overwritten by the next one
            batch.document_ids_BT[row, start:end] = document
            batch.conversations_BC[row, document] = example.conversation
            start = end
    return batch


def spans_of(flags: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the spans of the places whose flag is set."""
    edges = np.flatnonzero(np.diff(np.asarray(flags, np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


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


def collate_packed(rows: Sequence[Sequence[Example]]) -> Batch:
    for example in chain.from_iterable(rows):
        if example.media_prompt is not None:
            raise InputError(f"data.packing: conversation {example.conversation} brings images or sounds; set it to null")
    return _collate_rows(rows)


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

"""Packing: several conversations in one row, so that a batch has almost no padding.

Rows are filled once, by first-fit decreasing within windows of shuffled conversations, none of which is ever cut in two. Their
contents depend on the seed alone, the order of the rows on (seed, epoch). Models must keep the documents of a row apart
(`heads.inference.model_checks`).
B rows of a batch, T positions, C documents of a row at most, N conversations, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from configs.runtime.errors import InputError
from distill.dataset.batches import ConversationDataset, EpochSampler, Example, loader_of
from heads.modules.interface import NO_DOCUMENT, Batch

# Least number of conversations that are packed together, where there are so many. A larger window packs no better: 4,096
# conversations leave as much padding.
WINDOW = 2048

Row = tuple[int, ...]  # indices of the conversations in it


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
    """Put the examples of each row one after the other, and pad on the right."""
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
            raise InputError(
                f"data.packing: conversation {example.conversation} brings images or sounds; set data.packing to null"
            )
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

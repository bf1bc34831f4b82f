"""Conversations as training batches: token ids, which of them are labels, positions, and documents.

The order of an epoch depends on (seed, epoch) alone, so that a resumed run sees what the undisturbed one would have seen.
Conversations of similar length share a batch, because padding is work thrown away.

Left out on purpose: packing several conversations into a row (`document_ids_BT` is there for it).
B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from configs.errors import InputError
from distill.conversations import Conversation

NO_DOCUMENT = -1


class Batch(NamedTuple):
    """Right-padded conversations. A tuple, so that accelerate and pinned memory handle it as they handle any.

    The loss mask marks the **label**: position t is True where token t was written by the target (end-of-text included), and
    the logits at t - 1 predict it. Position 0 is never a label.
    """

    input_ids_BT: Tensor  # int64; 0 on padding
    loss_mask_BT: Tensor  # bool; False on padding
    position_ids_BT: Tensor  # int64, from 0 in each document; runs on over padding
    document_ids_BT: Tensor  # int64; which document of its row a token belongs to, NO_DOCUMENT on padding
    conversation_B: Tensor  # int64; which conversation of the data file a row is, from 0


class Example(NamedTuple):
    """One conversation to train on: its ids, of which those from `answer_start` on are the target's."""

    input_ids: tuple[int, ...]
    answer_start: int
    conversation: int = 0  # its place in the data file


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What one epoch costs in positions."""

    num_batches: int
    num_tokens: int
    num_padding: int

    @property
    def padding_share(self) -> float:
        """Padding positions among all positions."""
        return self.num_padding / (self.num_tokens + self.num_padding)


class ConversationDataset(Dataset[Example]):
    """Conversations cut at `max_length` tokens; those of whose answer nothing is left are dropped and counted.

    Args:
        conversations: rows of `train.jsonl`.
        max_length: longest row in tokens; more is cut off at the end.

    Raises:
        InputError: no conversation is left.
    """

    def __init__(self, conversations: Sequence[Conversation], max_length: int) -> None:
        examples = [
            Example((row.prompt_ids + row.answer_ids)[:max_length], len(row.prompt_ids), number)
            for number, row in enumerate(conversations)
        ]
        self.examples = [example for example in examples if example.answer_start < len(example.input_ids)]
        self.num_dropped = len(conversations) - len(self.examples)
        if not self.examples:
            raise InputError(
                f"none of {len(conversations)} conversations has an answer token within data.max_length = {max_length} tokens; "
                "raise it, or make data with shorter prompts"
            )

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    @property
    def lengths(self) -> list[int]:
        """Tokens by example."""
        return [len(example.input_ids) for example in self.examples]

    @property
    def num_labels(self) -> int:
        """Label tokens in all examples."""
        return sum(len(example.input_ids) - example.answer_start for example in self.examples)


class BucketedBatchSampler(Sampler[list[int]]):
    """Batches of indices: shuffled, sorted by length within windows of `window` batches, and shuffled as batches.

    A shorter last batch stays last, where accelerate's sharding by process expects it.

    Args:
        lengths: tokens by example.
        batch_size: examples a batch.
        seed: together with the epoch, chooses the order.
        window: batches whose examples are sorted together; larger pads less and mixes less.
    """

    drop_last = False  # read by accelerate

    def __init__(self, lengths: Sequence[int], batch_size: int, *, seed: int, window: int = 16) -> None:
        self.lengths = list(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.window = window
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch, counted from 0."""
        self.epoch = epoch

    @property
    def sampler(self) -> BucketedBatchSampler:
        """Itself: with several processes accelerate wraps this sampler and then passes epochs on to `.sampler` only."""
        return self

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(((self.seed << 20) + self.epoch) % 2**63)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        num_full = len(order) // self.batch_size * self.batch_size
        batches = [batch for part in self._windows(order[:num_full]) for batch in self._cut(part)]
        yield from (batches[number] for number in torch.randperm(len(batches), generator=generator).tolist())
        if num_full < len(order):
            yield order[num_full:]

    def measure(self) -> Lengths:
        """Return the size of the current epoch."""
        batches = [[self.lengths[index] for index in batch] for batch in self]
        positions = sum(max(batch) * len(batch) for batch in batches)
        tokens = sum(self.lengths)
        return Lengths(num_batches=len(batches), num_tokens=tokens, num_padding=positions - tokens)

    def _windows(self, order: Sequence[int]) -> Iterator[list[int]]:
        size = self.window * self.batch_size
        for start in range(0, len(order), size):
            yield sorted(order[start : start + size], key=lambda index: self.lengths[index])

    def _cut(self, indices: Sequence[int]) -> Iterator[list[int]]:
        for start in range(0, len(indices), self.batch_size):
            yield list(indices[start : start + self.batch_size])


def make_loader(dataset: ConversationDataset, batch_size: int, *, seed: int) -> DataLoader[Batch]:
    """Return a loader that accelerate can prepare; call `set_epoch` on its `batch_sampler` (or on the prepared loader)."""
    sampler = BucketedBatchSampler(dataset.lengths, batch_size, seed=seed)
    # A generator of its own: a loader without one draws from torch's at each epoch, and a resumed run would draw once more.
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, generator=torch.Generator())  # type: ignore[arg-type]


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples on the right into one batch."""
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
        conversation_B=torch.tensor([example.conversation for example in examples]),
    )

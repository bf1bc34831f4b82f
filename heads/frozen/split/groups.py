"""Groups of processes that share a target, and how its work is dealt to them.

Every forward must be run by all of a group. They decode the same prompts in lockstep (random numbers are a function of request
and position, so that all draw the same), and in training each brings a batch of its own, which all read in turn.
B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

Read = TypeVar("Read")
Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class TargetGroup:
    """The processes that share one target.

    Args:
        number: which of `count` groups.
        rank: of this process among the `size` of the group.
        same_inputs: the processes must bring the same inputs to a forward, not only as many forwards.
    """

    number: int
    count: int
    rank: int
    size: int
    same_inputs: bool
    processes: dist.ProcessGroup

    def member(self, rank: int) -> int:
        """Return the number, among all processes, of one of this group."""
        return self.number * self.size + rank


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of a work that the target does is this process's: part `number` of `count`.

    Of a group all do the same part, and one writes it.
    """

    number: int
    count: int
    writes: bool

    def gather(self, own: Sequence[Part]) -> list[Part]:
        """Return what those that write hand in, in the order of their parts."""
        found: list[Part] = gather_object(list(own) if self.writes else [])
        return found

    def in_all(self, own: Iterable[int]) -> set[int]:
        """Return the numbers that every process of this part hands in: what it has finished, after it was interrupted."""
        found: list[tuple[int, set[int]]] = gather_object([(self.number, set(own))])
        return set.intersection(*(numbers for part, numbers in found if part == self.number))


def share_of(group: TargetGroup | None, state: PartialState) -> Share:
    """Return this process's share where the target is shared by `group`; None: each process has a target of its own."""
    if group is None:
        return Share(number=state.process_index, count=state.num_processes, writes=True)
    return Share(number=group.number, count=group.count, writes=group.rank == 0)


def from_first(group: TargetGroup | None, numbers: Iterable[int]) -> Iterator[int]:
    """Yield, in all processes of a group, what the first one takes from its `numbers`; None: those of this process."""
    if group is None:
        yield from numbers
        return
    taken = iter(numbers)
    while True:
        sent = [next(taken, None) if group.rank == 0 else None]
        dist.broadcast_object_list(sent, group.member(0), group=group.processes)
        if sent[0] is None:
            return
        yield sent[0]


def in_turns(
    group: TargetGroup | None, ids_BT: Tensor, positions_BT: Tensor | None, read: Callable[[Tensor, Tensor | None], Read]
) -> Read:
    """Return what `read` makes of this process's batch, while each other process of the group gets that of its own.

    Args:
        group: of the target that `read` runs; None: there is none.
        ids_BT, positions_BT: what `read` takes. Shapes may differ between processes.
    """
    if group is None or not group.same_inputs:
        return read(ids_BT, positions_BT)
    shape = torch.tensor([*ids_BT.shape, positions_BT is not None], device=ids_BT.device)
    shapes = shape.new_empty(group.size * len(shape))
    dist.all_gather_into_tensor(shapes, shape, group=group.processes)
    own: list[Read] = []
    for rank, (B, T, is_packed) in enumerate(shapes.view(group.size, -1).tolist()):
        mine = rank == group.rank
        sent = [ids_BT.contiguous() if mine else ids_BT.new_empty(B, T)]
        if is_packed:
            sent.append(positions_BT.contiguous() if mine and positions_BT is not None else ids_BT.new_empty(B, T))
        for tensor in sent:
            dist.broadcast(tensor, group.member(rank), group=group.processes)
        result = read(sent[0], sent[1] if is_packed else None)
        if mine:
            own.append(result)
    return own[0]

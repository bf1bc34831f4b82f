"""A transformers `LogitsProcessor` on the target's logits: the output then follows the processed distribution without loss.

Each position of a round is processed with its own text: what is committed and the drafts before it. The draft is not processed.
A processor must be a function of (ids, scores): it is called with one text at a time, also with texts that are then dropped,
and twice with the same text. The `batch_id` of `PrefixConstrainedLogitsProcessor` is the request's place among all.
B batch, K target rows (the pending token and the drafts), G drafts, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor

from configs.runtime.errors import InputError
from heads.proposers.protocol import Proposal

# transformers' `LogitsProcessor` or `LogitsProcessorList`, or any function: ids [n, T] and scores [n, V] to scores [n, V].
Processor = Callable[[Tensor, Tensor], Tensor]
# transformers' processors that remember earlier calls; subclasses are taken to do so too.
STATEFUL = {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}


def prepared(given: Any) -> Processor:
    """Return a processor, or a (nested) list of them, as one; refuse what would not be exact.

    Raises:
        InputError: one cannot be called, or remembers earlier calls.
    """
    processors = list(_flat(given))
    for each in processors:
        _check(each)
    joined: Any = processors[0] if len(processors) == 1 else LogitsProcessorList(processors)
    processor: Processor = joined
    return processor


def _flat(given: Any) -> Iterator[Any]:
    if isinstance(given, list | tuple):
        for each in given:
            yield from _flat(each)
    else:
        yield given


def _check(processor: Any) -> None:
    name = type(processor).__name__
    if not callable(processor):
        raise InputError(f"logits_processor: expected a function of ids and scores or a list of such, got {name}")
    if not STATEFUL.isdisjoint(kind.__name__ for kind in type(processor).__mro__):
        raise InputError(
            f"logits_processor: {name} remembers earlier calls, and verification calls it with texts that are then dropped; "
            "give processors that are functions of ids and scores"
        )


def renumbered(processor: Any, number_of: Callable[[int], int]) -> Any:
    """Return a copy of a processor (from `prepared`) that gets `number_of(row)` as `batch_id` in place of a call's row."""
    if isinstance(processor, list):
        return LogitsProcessorList(renumbered(each, number_of) for each in processor)
    if not isinstance(processor, PrefixConstrainedLogitsProcessor):
        return processor
    own, allowed = copy.copy(processor), processor._prefix_allowed_tokens_fn
    own._prefix_allowed_tokens_fn = lambda row, ids_T: allowed(number_of(row), ids_T)
    return own


def processed(
    processor: Processor | None,
    logits_BKV: Tensor,
    tokens: Sequence[Sequence[int]],
    proposal: Proposal | None,
    numbers: Sequence[int],
    ends: Collection[int] = (),
) -> Tensor:
    """Return the logits `[B, K, V]` (float32) as a processor leaves them; None leaves them as they are.

    Rows behind a draft that the processor forbids (a score of -inf) or that ends the text stay as they are.

    Args:
        processor: see `prepared`.
        logits_BKV: the target's; row 0 follows the committed text, row i + 1 the text up to draft i.
        tokens: committed ids by row of the batch, the pending one included.
        proposal: the drafts; None: there are none.
        numbers: of the request in each row, its place among those decoded together.
        ends: tokens that end a text.

    Raises:
        InputError: the processor returns scores of another shape.
    """
    if processor is None:
        return logits_BKV
    scores_BKV = logits_BKV.float().clone()
    for row, committed in enumerate(tokens):
        own: Processor = renumbered(processor, [numbers[row]].__getitem__)  # a call has one row, 0
        waiting = [(0, list(committed))]
        while waiting:
            place, ids = waiting.pop()
            scores_1V = scores_BKV[row, place].unsqueeze(0).clone()
            changed_1V = own(torch.tensor([ids], device=scores_BKV.device), scores_1V)
            if changed_1V.shape != scores_1V.shape:
                found, wanted = list(changed_1V.shape), list(scores_1V.shape)
                raise InputError(f"logits_processor: {type(processor).__name__} made scores of shape {found} of {wanted}")
            scores_BKV[row, place] = changed_1V[0].float()
            for number, token in _drafts_after(proposal, row, place):
                if token not in ends and not changed_1V[0, token].isneginf():
                    waiting.append((number + 1, [*ids, token]))
    return scores_BKV


def _drafts_after(proposal: Proposal | None, row: int, place: int) -> list[tuple[int, int]]:
    """Return the number and the token of each draft that follows a target row."""
    if proposal is None:
        return []
    if proposal.parents_BN is None:
        numbers = [place] if place < proposal.num_drafted[row] else []
    else:
        numbers = [number for number, parent in enumerate(proposal.parents_BN[row].tolist()) if parent == place]
    return [(number, int(proposal.tokens_BG[row, number])) for number in numbers]

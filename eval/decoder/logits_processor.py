"""A transformers `LogitsProcessor` on the target's logits: the output then follows the processed distribution without loss.

Each position of a round is processed with its own text: what is committed and the drafts before it. The draft is not processed.
A processor must be a function of (ids, scores): it is called with one text at a time, also with texts that are then dropped,
and twice with the same text. The `batch_id` of `PrefixConstrainedLogitsProcessor` is the request's place among all.
B batch, K target rows (the pending token and the drafts), V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
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


def prepared(given: Any) -> Any:
    """Return a processor, or a (nested) list of them, as one.

    Raises:
        InputError: one remembers earlier calls.
    """
    if isinstance(given, list | tuple):
        joined = LogitsProcessorList()
        for each in given:
            own = prepared(each)
            joined += own if isinstance(own, list) else [own]
        return joined
    if not STATEFUL.isdisjoint(kind.__name__ for kind in type(given).__mro__):
        raise InputError(
            f"logits_processor: {type(given).__name__} remembers earlier calls, and verification calls it with texts that are "
            "then dropped; give processors that are functions of ids and scores"
        )
    return given


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
    processor: Processor,
    logits_BKV: Tensor,
    tokens: Sequence[Sequence[int]],
    proposal: Proposal | None,
    numbers: Sequence[int],
    ends: Collection[int],
) -> Tensor:
    """Return the logits `[B, K, V]` (float32) as a processor leaves them; `tokens` are committed, the pending one included.

    Rows behind a draft that the processor forbids (a score of -inf) or that ends the text (`ends`) stay as they are.
    """
    scores_BKV = logits_BKV.float().clone()
    for row, committed in enumerate(tokens):
        own: Processor = renumbered(processor, [numbers[row]].__getitem__)  # a call has one row, 0
        drafts: list[int] = [] if proposal is None else proposal.tokens_BG[row].tolist()
        if proposal is None or proposal.parents_BN is None:  # a chain: draft i follows row i
            parents = list(range(0 if proposal is None else proposal.num_drafted[row]))
        else:
            parents = proposal.parents_BN[row].tolist()
        waiting = [(0, list(committed))]
        while waiting:
            place, ids = waiting.pop()
            scores_1V = scores_BKV[row, place].unsqueeze(0).clone()
            changed_1V = own(torch.tensor([ids], device=scores_BKV.device), scores_1V)
            if changed_1V.shape != scores_1V.shape:
                found, wanted = list(changed_1V.shape), list(scores_1V.shape)
                raise InputError(f"logits_processor: {type(processor).__name__} made scores of shape {found} of {wanted}")
            scores_BKV[row, place] = changed_1V[0].float()
            for number, (parent, token) in enumerate(zip(parents, drafts, strict=False), start=1):
                if parent == place and token not in ends and not changed_1V[0, token].isneginf():
                    waiting.append((number, [*ids, token]))
    return scores_BKV

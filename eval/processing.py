"""A transformers `LogitsProcessor` on the target's logits: the output then follows the processed target's law.

Verification judges several positions at once, and a processor may look at the text so far, so each position is processed with
its own: what is committed, and the drafts on the way to it, in a chain or a tree. The draft stays as it is; the law that its
tokens were drawn from is known, so verification is exact, whatever the processor does to the other side. A processor that
forbids much of what the draft says costs acceptance only.

The processor must be a function of (ids, scores), row by row: verification asks it about texts that are then dropped, and about
the same text twice. Left out on purpose: processors that keep a state of their own from call to call; particles, which weigh
drafts by raw logits.
B batch, K target rows (the pending token and the drafts), G drafts, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from configs.errors import InputError
from heads.proposer import Proposal

# transformers' `LogitsProcessor` or `LogitsProcessorList`, or any function: ids [n, T] and scores [n, V] to scores [n, V].
Processor = Callable[[Tensor, Tensor], Tensor]
# transformers' processors that remember earlier calls.
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


def check_stateless(processor: Processor) -> None:
    """Refuse what is known to remember earlier calls.

    Raises:
        InputError: it does, or one of a list does.
    """
    for each in processor if isinstance(processor, list) else [processor]:
        if type(each).__name__ in STATEFUL:
            raise InputError(
                f"logits_processor: {type(each).__name__} remembers earlier calls, and verification asks about texts that are "
                "then dropped; give processors that are functions of ids and scores"
            )


def processed(
    processor: Processor | None, logits_BKV: Tensor, tokens: Sequence[Sequence[int]], proposal: Proposal | None
) -> Tensor:
    """Return the logits `[B, K, V]` (float32) as a processor leaves them; None leaves them as they are.

    Args:
        processor: a function of texts and scores.
        logits_BKV: the target's; row 0 follows the committed text, row i + 1 the text up to draft i.
        tokens: committed ids by row of the batch, the pending one included.
        proposal: the drafts; None: there are none.

    Raises:
        InputError: the processor returns scores of another shape.
    """
    if processor is None:
        return logits_BKV
    scores_BKV = logits_BKV.float().clone()
    by_length: dict[int, list[tuple[int, int, list[int]]]] = defaultdict(list)
    for row, committed in enumerate(tokens):
        for place, path in _paths(proposal, row).items():
            by_length[len(committed) + len(path)].append((row, place, [*committed, *path]))
    for members in by_length.values():
        rows_N, places_N = ([member[index] for member in members] for index in (0, 1))
        ids_NT = torch.tensor([text for _, _, text in members], device=logits_BKV.device)
        scores_NV = scores_BKV[rows_N, places_N]
        changed_NV = processor(ids_NT, scores_NV)
        if changed_NV.shape != scores_NV.shape:
            raise InputError(
                f"logits_processor: {type(processor).__name__} made scores of shape {list(changed_NV.shape)} of "
                f"{list(scores_NV.shape)}"
            )
        scores_BKV[rows_N, places_N] = changed_NV.float()
    return scores_BKV


def _paths(proposal: Proposal | None, row: int) -> dict[int, list[int]]:
    """Return the drafts on the way to each target row that counts, by the row's number; row 0 follows none."""
    paths: dict[int, list[int]] = {0: []}
    if proposal is None:
        return paths
    drafts = proposal.tokens_BG[row].tolist()
    if proposal.parents_BN is None:
        return {place: drafts[:place] for place in range(proposal.num_drafted[row] + 1)}
    for number, parent in enumerate(proposal.parents_BN[row].tolist()):
        if parent in paths:
            paths[number + 1] = [*paths[parent], drafts[number]]
    return paths

"""On-policy rows: a share of each training batch, on which the draft, as it stands, writes the answer.

The target supervises every position of that answer by its distribution (GKD, 2306.13649; for drafts DistillSpec, 2310.08461).
Every choice and draw is a function of (seed, optimiser step, micro-batch, row or conversation), so a resumed run decides as an
undisturbed one. All processes rewrite equally many rows, so they enter the same forwards. The caller unshards a sharded draft.
B batch, G drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from configs.schema.decoding import SamplingConfig
from configs.schema.training import DistillConfig
from distill.dataset.batches import Example, collate
from distill.generation.continuation import TokenRow, TokenSource, continue_rows
from heads.frozen.loading import Target
from heads.modules.interface import NO_DOCUMENT, Batch
from heads.proposers.draft_lm import DraftLM
from heads.sampling.counter_rng import CounterRNG, request_number

# Tokens drafted between two checks of which rows have ended. Their distributions are all held until then, [B, G, V].
STRIDE = 16


class RowSelection(NamedTuple):
    """The rows of a micro-batch whose answer the draft writes; `key` names the micro-batch's random numbers."""

    rows: tuple[int, ...]
    key: str


class Rewriter:
    """The on-policy rows of a run; the target's end-of-text tokens end an answer, and no row may leave its context."""

    def __init__(self, config: DistillConfig, target: Target) -> None:
        self.policy = config.policy
        self.seed = config.schedule.seed
        self.max_length = min(config.data.max_length, target.max_positions)
        self.sampling = SamplingConfig(temperature=config.policy.temperature)
        self.end_ids = frozenset(target.eos_token_ids)
        self.placeholder = target.runner.placeholder

    def choose(self, batch_size: int, *, step: int, micro_batch: int) -> RowSelection:
        """Choose the rows of a micro-batch, the same places in every process; on average they are the policy's share."""
        key = f"{self.seed}/{step}/{micro_batch}"
        num_rows = math.floor((self.policy.on_policy or 0.0) * batch_size + _uniform(f"{key}/count"))
        # Rows of a batch may be sorted by length, so taking the first ones would favour short answers.
        order = sorted(range(batch_size), key=lambda row: _uniform(f"{key}/order/{row}"))
        return RowSelection(rows=tuple(order[:num_rows]), key=key)

    def rewrite(self, batch: Batch, selection: RowSelection, draft: DraftLM) -> tuple[Batch, int]:
        """Let the draft, in evaluation mode, answer the selected rows; return the new batch and how many tokens it wrote."""
        examples, device = examples_of(batch), batch.input_ids_BT.device
        rows = [self._unanswered(row, examples[row], selection.key) for row in selection.rows]
        # A row whose prompt alone fills the target's context stays as it is.
        rows = [row for row in rows if len(row.prompt_ids) < row.limit]
        if not rows:
            return batch, 0
        source = _DraftSource(draft, self.sampling, device)
        for row in continue_rows(source, rows, seed=self.seed, has_ended=self._has_ended):
            if row.tokens[-1] == self.placeholder:  # for which an answer has no image or sound
                row.tokens.pop()
            if row.written:
                examples[row.key] = examples[row.key]._replace(input_ids=tuple(row.tokens))
        return collate(examples).to(device), sum(len(row.written) for row in rows)

    def _has_ended(self, row: TokenRow) -> bool:
        return row.tokens[-1] == self.placeholder or row.tokens[-1] in self.end_ids

    def _unanswered(self, row: int, example: Example, key: str) -> TokenRow:
        start = example.answer_start
        longest = self.policy.max_new_tokens or len(example.input_ids) - start
        return TokenRow(
            key=row,
            prompt_ids=example.input_ids[:start],
            limit=min(start + longest, self.max_length),
            request=request_number(f"{key}/{example.conversation}"),
        )


class _DraftSource(TokenSource):
    """Draws up to `STRIDE` tokens a step from the draft's own distribution."""

    def __init__(self, draft: DraftLM, sampling: SamplingConfig, device: torch.device) -> None:
        self.draft, self.sampling, self.device = draft, sampling, device

    def start(self, rows: Sequence[TokenRow]) -> None:
        self.draft.start([row.tokens for row in rows], max(row.limit for row in rows) + STRIDE)

    def draw(self, rows: Sequence[TokenRow], rng: CounterRNG) -> list[list[int]]:
        room = max(row.limit - len(row.tokens) for row in rows)
        tokens = [row.tokens for row in rows]
        return self.draft.propose(tokens, min(room, STRIDE), self.sampling, rng, keep_logits=False).tokens_BG.tolist()

    def keep_rows(self, places: Sequence[int]) -> None:
        self.draft.keep_rows(places)


def examples_of(batch: Batch) -> list[Example]:
    """Return the conversations that a batch was collated from."""
    batch = batch.on_host
    lengths = (batch.document_ids_BT != NO_DOCUMENT).sum(1).tolist()
    answer_starts = batch.loss_mask_BT.int().argmax(1).tolist()
    ids, conversations = batch.input_ids_BT.tolist(), batch.conversations_BC[:, 0].tolist()
    media = [None] * len(ids) if batch.media is None else batch.media.rows
    return [
        Example(tuple(row[:length]), start, conversation, media_prompt)
        for row, length, start, conversation, media_prompt in zip(
            ids, lengths, answer_starts, conversations, media, strict=True
        )
    ]


def _uniform(key: str) -> float:
    """Return a number in [0, 1) that depends on `key` alone."""
    return (request_number(key) >> 10) * 2.0**-53

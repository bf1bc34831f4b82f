"""The data policy: rows of a training batch on which the draft, as it stands, writes the answer anew.

A draft trained on the target's answers meets, when it serves, prefixes that end with tokens of its own. There are two remedies,
each for a share of every batch: on-policy rows, whose whole answer the draft writes (GKD, 2306.13649; for drafts DistillSpec,
2310.08461), and draft states, an answer cut at a random place and continued by the drafts of one speculative round. The target
then supervises every answer position by its distribution.

Every decision and draw is a function of (seed, optimiser step, micro-batch, row or conversation), so a resumed run decides as
an undisturbed one, and all processes rewrite equally many rows, so they enter the same forwards. The caller unshards a sharded
draft; a row is one conversation, so rows are not packed. B batch, T positions, G drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from configs.schema.decoding import SamplingConfig
from configs.schema.learning import PolicyConfig
from configs.schema.training import DistillConfig
from distill.dataset.batches import Example, collate
from distill.generation.continuation import TokenRow, continue_rows, request_number
from heads.frozen.loading import Target
from heads.modules.interface import NO_DOCUMENT, Batch
from heads.proposers.draft_lm import DraftLM
from heads.sampling.counter_rng import CounterRNG

# Tokens drafted between two checks of which rows have ended. Their distributions are all held until then, [B, G, V].
STRIDE = 16


@dataclass(frozen=True, kw_only=True)
class RowSelection:
    """The rows of a micro-batch whose answer the draft writes anew, and those whose answer is cut and continued.

    `key` names the random numbers that belong to this micro-batch.
    """

    on_policy: tuple[int, ...]
    draft_states: tuple[int, ...]
    key: str

    def __bool__(self) -> bool:
        return bool(self.on_policy or self.draft_states)


class Rewriter:
    """The data policy of a run; the target's end-of-text tokens end an answer, and no row may leave its context."""

    def __init__(self, config: DistillConfig, target: Target) -> None:
        self.policy: PolicyConfig = config.policy
        self.seed = config.schedule.seed
        self.num_draft_tokens = config.policy.num_draft_tokens or config.num_speculative_tokens
        self.max_length = min(config.data.max_length, target.max_positions)
        self.sampling = SamplingConfig(temperature=config.policy.temperature, top_p=config.policy.top_p)
        self.end_ids = frozenset(target.eos_token_ids)

    def choose(self, batch_size: int, *, step: int, num_steps: int, micro_batch: int) -> RowSelection:
        """Choose the rows of a micro-batch (its number counts from 0), the same places in every process.

        Numbers of rows are rounded at random so that their means are the phase's shares of `batch_size`, exactly. `step` counts
        the optimiser steps done before this one.
        """
        phase = self.policy.phase_after(step / num_steps)
        key = f"{self.seed}/{step}/{micro_batch}"
        # One number for both shares: each count alone, and their sum, is then off by less than one row.
        rounding = _uniform(f"{key}/count")
        num_on_policy = math.floor(phase.on_policy * batch_size + rounding)
        num_rewritten = math.floor((phase.on_policy + phase.draft_states) * batch_size + rounding)
        # Rows of a batch may be sorted by length, so taking the first ones would favour short answers.
        order = sorted(range(batch_size), key=lambda row: _uniform(f"{key}/order/{row}"))
        return RowSelection(
            on_policy=tuple(order[:num_on_policy]), draft_states=tuple(order[num_on_policy:num_rewritten]), key=key
        )

    def rewrite(self, batch: Batch, selection: RowSelection, draft: DraftLM) -> tuple[Batch, int]:
        """Let the draft, in evaluation mode, write on the selected rows; the others stay, and all are padded again.

        Returns:
            The new batch, on the old one's device, whose labels are the answer tokens kept and those written; and the number of
            tokens written.
        """
        examples, device = examples_of(batch), batch.input_ids_BT.device
        rows = [self._whole_answer(row, examples[row], selection.key) for row in selection.on_policy]
        rows += [self._after_cut(row, examples[row], selection.key) for row in selection.draft_states]
        # A row whose prompt alone fills the target's context stays as it is.
        rows = [row for row in rows if len(row.prompt_ids) < row.limit]
        if not rows:
            return batch, 0
        source = DraftSource(draft, self.sampling, device)
        for row in continue_rows(source, rows, seed=self.seed, has_ended=lambda row: row.tokens[-1] in self.end_ids):
            examples[row.key] = examples[row.key]._replace(input_ids=tuple(row.tokens))
        return collate(examples).to(device), sum(len(row.written) for row in rows)

    def _whole_answer(self, row: int, example: Example, key: str) -> TokenRow:
        """Return a row to be continued from its prompt."""
        longest = self.policy.max_new_tokens or len(example.input_ids) - example.answer_start
        return self._row(row, example, key, example.answer_start, longest)

    def _after_cut(self, row: int, example: Example, key: str) -> TokenRow:
        """Return a row to be continued from a random place of its answer, after the first token and before the last."""
        answer_length = len(example.input_ids) - example.answer_start
        earliest = min(1, answer_length - 1)
        place = earliest + int(_uniform(f"{key}/cut/{example.conversation}") * (answer_length - earliest))
        return self._row(row, example, key, example.answer_start + place, self.num_draft_tokens)

    def _row(self, row: int, example: Example, key: str, num_kept: int, num_new: int) -> TokenRow:
        request = request_number(f"{key}/{example.conversation}")
        limit = min(num_kept + num_new, self.max_length)
        return TokenRow(key=row, prompt_ids=example.input_ids[:num_kept], limit=limit, request=request)


class DraftSource:
    """Draws up to `STRIDE` tokens a step from the draft's own distribution (`distill.generation.continuation.TokenSource`)."""

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

    def has_room(self, row: TokenRow) -> bool:
        return False

    def put_rows(self, places: Sequence[int], rows: Sequence[TokenRow]) -> None:
        raise NotImplementedError("rows that the draft writes start together")


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

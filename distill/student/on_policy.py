"""The data policy: rows of a training batch that the draft, as it stands, writes anew before the target judges them.

A draft trained on the target's answers meets, when it serves, prefixes that end with tokens of its own. Two remedies, each
for a share of every batch (`configs.schema.learning`): on-policy rows, whose whole answer the draft writes (GKD, 2306.13649;
for drafts DistillSpec, 2310.08461), and draft states, an answer cut at a random place and continued by the drafts of one
speculative round. In both the target supervises every answer position by its distribution; which token was drawn there does
not matter, so losses on the label token have no place here (`configs.schema.training` refuses them).

Every decision and draw is a function of (seed, optimiser step, micro-batch, row or conversation): a resumed run decides as
the undisturbed one. How many rows are rewritten does not depend on the process, so that all enter the same forwards.

Left out on purpose: drawing by a sharded draft; the caller brings a whole copy. And packed rows: a row is one conversation.
B batch, T positions, G drafts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from configs.schema.decoding import SamplingConfig
from configs.schema.learning import PolicyConfig
from configs.schema.training import DistillConfig
from distill.dataset.batches import NO_DOCUMENT, Batch, Example, collate
from distill.generation.answers import request_number, up_to_end
from heads.proposers.draft_lm import DraftLM
from heads.sampling.counter_rng import Streams
from heads.target.loading import Target

# Tokens drafted between two looks at which rows have ended. The distributions of all of them are held until then, [B, G, V].
STRIDE = 16


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which rows of a micro-batch the draft writes on.

    Args:
        on_policy: rows whose answer is written anew.
        draft_states: rows whose answer is cut and continued.
        key: of the random numbers that belong to this micro-batch.
    """

    on_policy: tuple[int, ...]
    draft_states: tuple[int, ...]
    key: str

    def __bool__(self) -> bool:
        return bool(self.on_policy or self.draft_states)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """A row that the draft is to continue: the tokens that stay, and the length in tokens it may reach."""

    row: int
    kept: tuple[int, ...]
    limit: int


class Rewriter:
    """The data policy of a run.

    Args:
        config: the run's config.
        target: whose end-of-text tokens end an answer, and whose context no row may leave.
    """

    def __init__(self, config: DistillConfig, target: Target) -> None:
        self.policy: PolicyConfig = config.policy
        self.seed = config.schedule.seed
        self.num_draft_tokens = config.policy.num_draft_tokens or config.num_speculative_tokens
        self.max_length = min(config.data.max_length, target.max_positions)
        self.sampling = SamplingConfig(temperature=config.policy.temperature, top_p=config.policy.top_p)
        self.end_ids = frozenset(target.eos_token_ids)

    def choose(self, batch_size: int, *, step: int, num_steps: int, micro_batch: int) -> Choice:
        """Choose the rows of a micro-batch, the same places in every process.

        Numbers of rows are rounded at random so that their means are the phase's shares of `batch_size`, exactly.

        Args:
            batch_size: rows of the micro-batch.
            step: optimiser steps done before this one.
            num_steps: of the whole run.
            micro_batch: its number in the step, from 0.
        """
        phase = self.policy.phase_after(step / num_steps)
        key = f"{self.seed}/{step}/{micro_batch}"
        # One number for both shares: each count alone, and their sum, is then off by less than one row.
        rounding = _uniform(f"{key}/count")
        num_on_policy = math.floor(phase.on_policy * batch_size + rounding)
        num_rewritten = math.floor((phase.on_policy + phase.draft_states) * batch_size + rounding)
        # Rows of a batch may be sorted by length, so taking the first ones would favour short answers.
        order = sorted(range(batch_size), key=lambda row: _uniform(f"{key}/order/{row}"))
        return Choice(on_policy=tuple(order[:num_on_policy]), draft_states=tuple(order[num_on_policy:num_rewritten]), key=key)

    def rewrite(self, batch: Batch, choice: Choice, draft: DraftLM) -> tuple[Batch, int]:
        """Let the draft write on the chosen rows; the others stay, and all are padded again.

        Args:
            batch: one conversation a row.
            choice: see `choose`.
            draft: the draft as it stands, in evaluation mode. Its parameters get no gradients from this.

        Returns:
            The new batch, on the old one's device; its labels are the answer tokens that were kept and those the draft
            wrote. And how many the draft wrote.
        """
        examples = examples_of(batch)
        openings = [self._anew(row, examples[row]) for row in choice.on_policy]
        openings += [self._cut(row, examples[row], choice.key) for row in choice.draft_states]
        # Without room, because the prompt alone fills the target's context, a row stays as it is.
        openings = [opening for opening in openings if len(opening.kept) < opening.limit]
        if not openings:
            return batch, 0
        requests = [request_number(f"{choice.key}/{examples[opening.row].conversation}") for opening in openings]
        streams = Streams(self.seed, requests, batch.input_ids_BT.device)
        written = continue_rows(draft, openings, self.sampling, streams, self.end_ids)
        for opening, ids in zip(openings, written, strict=True):
            examples[opening.row] = examples[opening.row]._replace(input_ids=opening.kept + tuple(ids))
        rewritten = collate(examples)
        return Batch(*(tensor.to(batch.input_ids_BT.device) for tensor in rewritten)), sum(map(len, written))

    def _anew(self, row: int, example: Example) -> Opening:
        """Keep a row's prompt."""
        longest = self.policy.max_new_tokens or len(example.input_ids) - example.answer_start
        limit = min(example.answer_start + longest, self.max_length)
        return Opening(row=row, kept=example.input_ids[: example.answer_start], limit=limit)

    def _cut(self, row: int, example: Example, key: str) -> Opening:
        """Keep a row up to a random place of its answer, before the last token and, as in a round, after the first."""
        answer_length = len(example.input_ids) - example.answer_start
        earliest = min(1, answer_length - 1)
        place = earliest + int(_uniform(f"{key}/cut/{example.conversation}") * (answer_length - earliest))
        kept = example.input_ids[: example.answer_start + place]
        return Opening(row=row, kept=kept, limit=min(len(kept) + self.num_draft_tokens, self.max_length))


def examples_of(batch: Batch) -> list[Example]:
    """Return the conversations that a batch was collated from."""
    lengths = (batch.document_ids_BT != NO_DOCUMENT).sum(1).tolist()
    answer_starts = batch.loss_mask_BT.int().argmax(1).tolist()
    ids, conversations = batch.input_ids_BT.tolist(), batch.conversations_BC[:, 0].tolist()
    return [
        Example(tuple(row[:length]), start, conversation)
        for row, length, start, conversation in zip(ids, lengths, answer_starts, conversations, strict=True)
    ]


@torch.inference_mode()
def continue_rows(
    draft: DraftLM, openings: Sequence[Opening], sampling: SamplingConfig, streams: Streams, end_ids: Collection[int]
) -> list[list[int]]:
    """Continue rows by the draft's own distribution until each has ended or reached its limit.

    Args:
        draft: continues them.
        openings: at least one, each below its limit.
        sampling: the distribution of the draws.
        streams: the rows' random numbers; rows that end leave it.
        end_ids: tokens that end an answer.

    Returns:
        What was written on each row, at least one token, a token that ends the answer last where one was drawn.
    """
    rows = [list(opening.kept) for opening in openings]
    limits = [opening.limit for opening in openings]
    active = list(range(len(rows)))
    draft.start(rows, max(limits) + STRIDE)
    while active:
        room = max(limits[number] - len(rows[number]) for number in active)
        proposal = draft.propose([rows[number] for number in active], min(room, STRIDE), sampling, streams, keep_logits=False)
        for number, drafted in zip(active, proposal.tokens_BG.tolist(), strict=True):
            rows[number] += up_to_end(drafted, end_ids)[: limits[number] - len(rows[number])]
        going = [len(rows[number]) < limits[number] and rows[number][-1] not in end_ids for number in active]
        keep = [place for place, goes in enumerate(going) if goes]
        if keep and len(keep) < len(active):
            draft.keep_rows(keep)
            streams.keep_rows(keep)
        active = [active[place] for place in keep]
    return [row[len(opening.kept) :] for row, opening in zip(rows, openings, strict=True)]


def _uniform(key: str) -> float:
    """Return a number in [0, 1) that depends on `key` alone."""
    return (request_number(key) >> 10) * 2.0**-53

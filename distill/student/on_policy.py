"""On-policy rows: a share of each training batch, on which the draft, as it stands, writes the answer.

The target supervises every position of that answer by its distribution (GKD, 2306.13649; for drafts DistillSpec, 2310.08461).
Of a row with several answers the draft writes one, drawn, and the row ends with it; those before stay labels.
Every choice and draw is a function of (seed, optimiser step, micro-batch, row or conversation), so a resumed run decides as an
undisturbed one. All processes rewrite equally many rows, so they enter the same forwards. The caller unshards a sharded draft.
B batch, G drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from configs.schema.decoding import SamplingConfig
from configs.schema.training import DistillConfig
from distill.dataset.batches import Example, collate, spans_of
from distill.generation.continuation import Request, TokenSource, continue_requests
from heads.frozen.loading import Target
from heads.modules.interface import Batch
from heads.proposers.draft_lm import DraftLM
from heads.proposers.protocol import RoundInputs
from heads.sampling.draws import CounterRNG, request_number

# Tokens drafted between two checks of which rows have ended. Their distributions are all held until then, [B, G, V].
STRIDE = 16


class RowSelection(NamedTuple):
    """The rows of a micro-batch whose answer the draft writes; `key` names the micro-batch's random numbers."""

    rows: tuple[int, ...]
    key: str


class Rewriter:
    """The on-policy rows of a run: answers as long as those in the data, which the target's end-of-text tokens end."""

    def __init__(self, config: DistillConfig, target: Target) -> None:
        self.policy = config.policy
        self.seed = config.schedule.seed
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
        if not selection.rows:
            return batch, 0
        examples, device = examples_of(batch), batch.input_ids_BT.device
        for row in selection.rows:
            ends = [end for _, end in examples[row].spans]
            answer = int(_uniform(f"{selection.key}/answer/{examples[row].conversation}") * len(ends))
            examples[row] = examples[row].up_to(ends[answer])
        answers: dict[int, list[int]] = {}
        requests = [self._unanswered(row, examples[row], selection.key, answers) for row in selection.rows]
        continue_requests(_DraftSource(draft, self.sampling, device), requests, seed=self.seed)
        for row, written in answers.items():
            if written[-1] == self.placeholder:  # for which an answer has no image or sound
                written.pop()
            if written:
                prompt_ids = examples[row].input_ids[: examples[row].answer_start]
                examples[row] = examples[row]._replace(input_ids=(*prompt_ids, *written))
        return collate(examples).to(device), sum(map(len, answers.values()))

    def _has_ended(self, request: Request) -> bool:
        return request.tokens[-1] == self.placeholder or request.tokens[-1] in self.end_ids

    def _unanswered(self, row: int, example: Example, key: str, answers: dict[int, list[int]]) -> Request:
        start = example.answer_start
        return Request(
            prompt_ids=example.input_ids[:start],
            limit=len(example.input_ids),
            number=request_number(f"{key}/{example.conversation}"),
            has_ended=self._has_ended,
            on_done=partial(answers.__setitem__, row),
        )


class _DraftSource(TokenSource):
    """Draws up to `STRIDE` tokens a step from the draft's own distribution."""

    def __init__(self, draft: DraftLM, sampling: SamplingConfig, device: torch.device) -> None:
        self.draft, self.sampling, self.device = draft, sampling, device

    def start(self, slots: Sequence[Request]) -> None:
        self.draft.start([each.tokens for each in slots], max(each.limit for each in slots) + STRIDE)

    def draw(self, slots: Sequence[Request], rng: CounterRNG) -> list[list[int]]:
        room = max(each.limit - len(each.tokens) for each in slots)
        inputs = RoundInputs.of([each.tokens for each in slots], rng, num_drafts=STRIDE)
        return self.draft.propose(inputs, min(room, STRIDE), self.sampling, keep_logits=False).tokens_BG.tolist()

    def keep_rows(self, places: Sequence[int]) -> None:
        self.draft.keep_rows(places)


def examples_of(batch: Batch) -> list[Example]:
    """Return the conversations that a batch was collated from."""
    batch = batch.on_host
    ids, conversations = batch.input_ids_BT.tolist(), batch.conversations_BC[:, 0].tolist()
    media = [None] * len(ids) if batch.media is None else batch.media.rows
    examples = []
    for row, flags_T, conversation, media_prompt in zip(ids, batch.loss_mask_BT, conversations, media, strict=True):
        *earlier, (start, end) = spans_of(flags_T)
        examples.append(Example(tuple(row[:end]), start, conversation, media_prompt, tuple(earlier)))
    return examples


def _uniform(key: str) -> float:
    """Return a number in [0, 1) that depends on `key` alone."""
    return (request_number(key) >> 10) * 2.0**-53

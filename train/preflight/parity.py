"""Parity of drafting and training: the logits a head drafts from beside those of the training forward over the same tokens.

Overfitting one conversation does not show every fault. The pending token, for one, follows from the state before it, so a head
that knows its text may draft it correctly even from a wrong pending token. Here every draft of a decoding is compared.
W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from configs.schema.decoding import DecodeConfig, SamplingConfig
from distill.dataset.batches import Example, collate
from eval.decoder.decode import Request, decode
from heads.families.registry import serve
from heads.frozen.hidden_states import TargetStates
from heads.modules.interface import Depth
from heads.modules.output_head import HeadModule
from heads.proposers.protocol import Proposal, Proposer, Tokens
from heads.sampling.counter_rng import CounterRNG
from train.tasks.head import HeadTask

# Decoded after the fitted text, so that some rounds keep a part of their drafts and some keep none.
MORE_TOKENS = 16
# The largest relative difference that counts as rounding. Right heads on SmolLM2-135M reached 0.06 in bfloat16; wrong tokens,
# states and orders made 0.1 to 1.8 on tiny targets, the least where a head hardly reads what is wrong.
TOLERANCES = {torch.bfloat16: 0.2, torch.float16: 0.03, torch.float32: 0.01}


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The largest difference of drafting and training: the norm of the logits' difference over that of the centred logits."""

    size: float
    draft: int  # which of its round, from 1
    round: int  # from 1
    tolerance: float

    @property
    def is_rounding(self) -> bool:
        """Whether it can come from the order of sums alone."""
        return self.size <= self.tolerance


@torch.no_grad()
def largest_gap(task: HeadTask, module: nn.Module, text: Example, num_drafts: int) -> Gap:
    """Decode a prompt, and compare the logits of every draft with those of the training forward.

    Args:
        module: the head under its objective; a copy of it drafts.
        text: a prompt and the answer that the head was fitted to; `MORE_TOKENS` more are decoded.
        num_drafts: in a round, no more than the head was trained for.
    """
    head = serve(task.copy_of(module), task.target.model)
    recording = _RecordingProposer(task.family.propose(head, task.target.device))
    length = len(text.input_ids) - text.answer_start + MORE_TOKENS
    prompt = text.input_ids[: text.answer_start]
    request = Request(prompt_id="parity", category="", tokens=prompt, media_prompt=text.media_prompt)
    decode(task.target, [request], DecodeConfig(num_speculative_tokens=num_drafts, max_new_tokens=length), recording)
    tolerance = TOLERANCES.get(task.target.model.dtype, TOLERANCES[torch.float32])
    gaps = [
        Gap(size=size, draft=draft, round=number, tolerance=tolerance)
        for number, (tokens, proposal) in enumerate(recording.rounds, 1)
        for draft, size in enumerate(_round_gaps(task, head, tokens, text, proposal), 1)
    ]
    return max(gaps, key=lambda gap: gap.size)


def _round_gaps(task: HeadTask, head: nn.Module, tokens: Sequence[int], text: Example, proposal: Proposal) -> list[float]:
    ids = (*tokens, *proposal.tokens_BG[0].tolist())
    batch = collate([text._replace(input_ids=ids)]).to(task.target.device)
    depths: list[Depth] = head(batch, task.states(batch))
    origin = len(tokens) - 2  # the last position that the target had read; the pending token comes after it
    token_ids_W = cast(HeadModule, head).token_ids_W
    gaps = []
    as_trained = depths[: cast(HeadModule, head).settings.drafted_as_trained]
    for depth, drafted_V in zip(as_trained, cast(Tensor, proposal.logits_BGV)[0], strict=False):
        trained_W = depth.logits_of(depth.hidden_ND[depth.origins_N == origin])[0].float()
        drafted_W = (drafted_V if token_ids_W is None else drafted_V[token_ids_W]).float()
        gaps.append(float((drafted_W - trained_W).norm() / (trained_W - trained_W.mean()).norm()))
    return gaps


class _RecordingProposer:
    """A proposer that records its proposals and the tokens they continued, for a batch of one row."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.taps = proposer, proposer.taps
        self.rounds: list[tuple[list[int], Proposal]] = []

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self.proposer.start(tokens, capacity, states)

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, rng: CounterRNG, *, keep_logits: bool
    ) -> Proposal:
        proposal = self.proposer.propose(tokens, num_tokens, sampling, rng, keep_logits=True)
        self.rounds.append((list(tokens[0]), proposal))
        return proposal

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        self.proposer.commit(num_accepted, states)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.proposer.keep_rows(rows)

"""Penalties for tokens that a text holds already, and the counts by which they are taken.

A repetition penalty (Keskar et al., 1909.05858; transformers' definition) divides the positive logits of all tokens of prompt
and answer, and multiplies the negative ones. Presence and frequency penalties (OpenAI's, as in vLLM) are of the answer's tokens
alone, and are taken off their logits: once, and for each time that a token was given. All come before the temperature. A draft
counts for the positions behind it, so that speculative decoding samples by the distributions of plain decoding.
B rows, T tokens, G drafts, K = G + 1, V vocabulary, W the draft's; `...` any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from configs.schema.decoding import DecodeConfig
from heads.device import row_tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class TextCounts:
    """How often each token stands in a text, and what that costs it."""

    penalties: DecodeConfig
    in_prompt: Tensor  # [..., V] bool, whether at all
    in_answer: Tensor  # [..., V] float32

    @classmethod
    def of(
        cls,
        penalties: DecodeConfig,
        texts: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> TextCounts | None:
        """Count texts `[B, V]`, each a prompt and its answer so far; None where nothing is penalised.

        Ids beyond the vocabulary, by which some families mark images, are left out.
        """
        if not penalties.penalises:
            return None
        ids_BT = row_tensor(texts, device, fill=vocab_size).clamp(max=vocab_size)
        is_prompt_BT = torch.arange(ids_BT.shape[1], device=device) < row_tensor([[each] for each in prompt_lengths], device)
        nothing_BV = torch.zeros(len(texts), vocab_size + 1, device=device)  # the last column is cut off
        prompt_BV, answer_BV = (nothing_BV.scatter_add(1, ids_BT, each.float()) for each in (is_prompt_BT, ~is_prompt_BT))
        return cls(penalties=penalties, in_prompt=prompt_BV[:, :-1] > 0, in_answer=answer_BV[:, :-1])

    def then(self, tokens_B: Tensor) -> TextCounts:
        """Return the counts `[B, V]` after another token of each answer."""
        tokens_B1 = tokens_B.unsqueeze(1)
        return replace(
            self, in_answer=self.in_answer.scatter_add(1, tokens_B1, torch.ones_like(tokens_B1, dtype=torch.float32))
        )

    def along(self, drafts_BG: Tensor) -> TextCounts:
        """Return the counts `[B, K, V]` after the texts and after each of their drafts."""
        drafted_BKV = self.in_answer.new_zeros(len(drafts_BG), drafts_BG.shape[1] + 1, self.in_answer.shape[-1])
        drafted_BKV[:, 1:].scatter_(2, drafts_BG.unsqueeze(2), 1.0)
        in_answer_BKV = self.in_answer.unsqueeze(1) + drafted_BKV.cumsum(1)
        return replace(self, in_prompt=self.in_prompt.unsqueeze(1), in_answer=in_answer_BKV)

    def among(self, ids_W: Tensor) -> TextCounts:
        """Return the counts `[..., W]` of some tokens."""
        return replace(self, in_prompt=self.in_prompt[..., ids_W], in_answer=self.in_answer[..., ids_W])

    def to(self, device: torch.device) -> TextCounts:
        return replace(self, in_prompt=self.in_prompt.to(device), in_answer=self.in_answer.to(device))


def penalised(logits: Tensor, counts: TextCounts | None) -> Tensor:
    """Return logits less their tokens' penalties; without counts as they are. A draft's may be of the first tokens only."""
    if counts is None:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scale = counts.penalties.repetition_penalty or 1.0
    once, each_time = (getattr(counts.penalties, name) or 0.0 for name in ("presence_penalty", "frequency_penalty"))
    in_prompt, in_answer = (each[..., : logits.shape[-1]] for each in (counts.in_prompt, counts.in_answer))
    was_given = in_answer > 0
    scaled = torch.where(logits > 0, logits / scale, logits * scale)
    return torch.where(in_prompt | was_given, scaled, logits) - each_time * in_answer - once * was_given

"""Answers to one request as pairs, and read by the target once more, whole. T tokens of the answer, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from eval.decoder.records import Generation
from heads.frozen.loading import Target
from heads.frozen.media import MediaPrompt
from heads.inference.causal_lm import forward_rows, head_logits, new_cache, read_documents
from heads.inference.kv_cache import LAYERS


def pair_answers(plain: Sequence[Generation], speculative: Sequence[Generation]) -> list[tuple[Generation, Generation]]:
    """Return each plain answer with the speculative one to the same request."""
    other = {(answer.prompt_id, answer.turn): answer for answer in speculative}
    if len(plain) != len(speculative) or any((answer.prompt_id, answer.turn) not in other for answer in plain):
        raise ValueError("plain and speculative answers must be to the same requests, one each")
    return [(answer, other[answer.prompt_id, answer.turn]) for answer in plain]


@torch.no_grad()
def answer_logits(
    target: Target, prompt: Sequence[int], answer: Sequence[int], media_prompt: MediaPrompt | None = None
) -> Tensor:
    """Return the logits `[T, V]` from which each token of an answer came; row t is after `answer[:t]`."""
    return head_logits(target.model, answer_states(target, prompt, answer, media_prompt))


@torch.no_grad()  # in inference mode a lean or compiled forward would run
def answer_states(
    target: Target,
    prompt: Sequence[int],
    answer: Sequence[int],
    media_prompt: MediaPrompt | None = None,
    kv_cache: Literal["int8"] | None = None,
) -> Tensor:
    """Return the final states `[T, D]` before each token of an answer, by one forward of transformers', or in such a cache."""
    ids_1T = torch.tensor([[*prompt, *answer[:-1]]], device=target.device)
    media = target.media_inputs([media_prompt], [prompt])
    if kv_cache is None:
        hidden_1TD = read_documents(target.model, ids_1T, None, media)
    else:
        cache = new_cache(target.model, ids_1T.shape[1], LAYERS[kv_cache])
        hidden_1TD = forward_rows(target.model, cache, ids_1T, [0], media=media)
    return hidden_1TD[0, len(prompt) - 1 :]

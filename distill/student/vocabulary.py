"""The choice of a reduced draft vocabulary: the most frequent tokens of the answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from configs.runtime.errors import ConfigError
from distill.dataset.conversations import Conversation
from heads.proposers.vocabulary import DraftVocabulary
from heads.target.loading import Target

log = logging.getLogger("draftsmith")

ROWS_AT_ONCE = 1024


def most_frequent_answer_tokens(conversations: Sequence[Conversation], size: int, target: Target) -> DraftVocabulary:
    """Return the `size` most frequent answer tokens, ties by the lower id; those that end an answer are always among them.

    Prompts do not count, as a draft only continues answers. Every process that reads the same conversations chooses the same.

    Raises:
        ConfigError: `size` is larger than the target's vocabulary, or has no room for the tokens that end an answer.
        ValueError: there are no conversations.
    """
    if not conversations:
        raise ValueError("a draft vocabulary is chosen from conversations, and there are none")
    ends = list(target.eos_token_ids)
    if not len(ends) <= size <= target.vocab_size:
        limits = f"{max(1, len(ends))} (tokens that end an answer) to {target.vocab_size} (the target's vocabulary)"
        raise ConfigError(f"student.draft_vocab_size: expected {limits}, got {size}")
    counts_V = _count_answer_tokens(conversations, target.vocab_size)
    total = int(counts_V.sum())
    priority_V = counts_V.clone()
    priority_V[ends] = total + 1
    ids_W = priority_V.argsort(descending=True, stable=True)[:size].sort().values
    covered = int(counts_V[ids_W].sum()) / total
    log.info("draft vocabulary: %d of %d tokens, %.2f %% of all answer tokens", size, target.vocab_size, 100 * covered)
    return DraftVocabulary(token_ids_W=ids_W, target_vocab_size=target.vocab_size)


def _count_answer_tokens(conversations: Sequence[Conversation], vocab_size: int) -> Tensor:
    """Return how often each token stands in an answer, int64 `[V]`, reading `ROWS_AT_ONCE` conversations at a time."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for start in range(0, len(conversations), ROWS_AT_ONCE):
        tokens = [token for row in conversations[start : start + ROWS_AT_ONCE] for token in row.answer_ids]
        counts_V += torch.bincount(torch.tensor(tokens), minlength=vocab_size)
    return counts_V

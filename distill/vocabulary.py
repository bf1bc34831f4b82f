"""The choice of a reduced draft vocabulary: the tokens that stand most often in the answers of the training data."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from configs.runtime.errors import ConfigError
from distill.dataset.conversations import Conversation, index_of
from heads.frozen.loading import Target
from heads.vocabulary import DraftVocabulary

log = logging.getLogger("draftsmith")


def most_frequent_answer_tokens(conversations: Sequence[Conversation], size: int, target: Target) -> DraftVocabulary:
    """Return the `size` most frequent answer tokens, ties by the lower id; those that end an answer are always among them."""
    ends = list(target.eos_token_ids)
    if not max(1, len(ends)) <= size <= target.vocab_size:
        limits = f"{max(1, len(ends))} (tokens that end an answer) to {target.vocab_size} (the target's vocabulary)"
        raise ConfigError(f"draft_vocab_size: expected {limits}, got {size}")
    counts = index_of(conversations).answer_counts
    counts_V = torch.zeros(target.vocab_size, dtype=torch.int64)
    counts_V[: len(counts)] = torch.from_numpy(counts)
    priority_V = counts_V.clone()
    priority_V[ends] = counts_V.sum() + 1
    ids_W = priority_V.argsort(descending=True, stable=True)[:size].sort().values
    covered = int(counts_V[ids_W].sum()) / int(counts_V.sum())
    log.info("draft vocabulary: %d of %d tokens, %.2f %% of all answer tokens", size, target.vocab_size, 100 * covered)
    return DraftVocabulary(token_ids_W=ids_W, target_vocab_size=target.vocab_size)

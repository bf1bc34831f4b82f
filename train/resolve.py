"""What a recipe leaves to the target and the data: settings that say `auto`, and the tokens of a reduced draft vocabulary."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from configs.runtime.errors import ConfigError
from configs.schema.base import AUTO
from configs.schema.heads import EagleSettings
from configs.schema.training import DistillConfig, HeadsConfig
from distill.dataset.conversations import Conversation, index_of
from heads.families.eagle3 import block_to_copy
from heads.frozen.hidden_states import num_blocks
from heads.frozen.loading import Target
from heads.metadata import locate_artifact, read_metadata
from heads.vocabulary import DraftVocabulary

USUAL_LENGTH = 2048  # tokens of a conversation; where some are longer, as many as `USUAL_SHARE` of them have, or `LONGEST`
USUAL_SHARE, LONGEST = 0.95, 8192
VOCABULARY_STEP, LARGEST_VOCABULARY = 1024, 32_768
WINDOW_STEP, WINDOW_SHARE = 128, 0.9  # a window holds this share of the conversations whole
WIDTH = 576  # of the target that these learning rates were found with (docs/benchmarks.md)
HEAD_RATE, DRAFT_LM_RATE = 1e-3, 3e-3
DEPTH_SHARE = 10  # a draft LM keeps one of so many of the target's blocks

log = logging.getLogger("draftsmith")
R = TypeVar("R", bound=HeadsConfig | DistillConfig)


def resolve(config: R, target: PreTrainedModel, train: Sequence[Conversation] | None) -> R:
    """Return a recipe in which nothing is `auto`, and log each value with its reason.

    Of the target only names and sizes are asked: it may lie on the meta device. `train` None: there are no data yet.
    """
    for key, value, reason in _resolved(config, target, train):
        section, name = key.split(".")
        log.info("%s auto: %s, %s", key, value, reason)
        changed = getattr(config, section).model_copy(update={name: value})
        config = cast(R, config.model_copy(update={section: changed}))
    return config


def _resolved(
    config: HeadsConfig | DistillConfig, target: PreTrainedModel, train: Sequence[Conversation] | None
) -> Iterator[tuple[str, Any, str]]:
    """Yield the key of each setting that is left open, its value, and where that comes from."""
    text, heads = target.config.get_text_config(), isinstance(config, HeadsConfig)
    max_length = config.data.max_length
    if max_length == AUTO:
        context = int(getattr(text, "max_position_embeddings", None) or USUAL_LENGTH)
        max_length, reason = _max_length(min(context, config.data.pack_length or LONGEST), train)
        yield "data.max_length", max_length, reason
    if config.optimizer.learning_rate == AUTO:
        rate = (HEAD_RATE if heads else DRAFT_LM_RATE) * min(1.0, math.sqrt(WIDTH / text.hidden_size))
        yield "optimizer.learning_rate", float(f"{rate:.2g}"), f"for a width of {text.hidden_size}"
    if isinstance(config, HeadsConfig):
        if config.head.draft_vocab_size == AUTO:
            yield "head.draft_vocab_size", *_vocabulary(int(text.vocab_size), train, config.init)
        if isinstance(config.head, EagleSettings) and config.head.init_block == AUTO:
            number, complaint = block_to_copy(target, config.head)
            reason = "the block that reads the last tap" if complaint is None else f"as block {number} {complaint}"
            yield "head.init_block", number if complaint is None else None, reason
        if getattr(config.head, "window", None) == AUTO:
            yield "head.window", *_window(max_length, train)
        return
    if config.student.draft_vocab_size == AUTO:
        yield "student.draft_vocab_size", *_vocabulary(int(text.vocab_size), train)
    if config.student.layers == AUTO:
        kept = list(range(max(1, num_blocks(target) // DEPTH_SHARE)))
        yield "student.layers", kept, f"the first of {num_blocks(target)} blocks"


def _max_length(most: int, train: Sequence[Conversation] | None) -> tuple[int, str]:
    """Return `USUAL_LENGTH` or, of longer conversations, what `USUAL_SHARE` of them fit in; at most `LONGEST` and `most`."""
    if train is None:
        return min(USUAL_LENGTH, most), "for data yet to be made"
    lengths = index_of(train).lengths
    usual = int(np.quantile(lengths, USUAL_SHARE, method="inverted_cdf"))
    length = min(max(USUAL_LENGTH, usual), LONGEST, most)
    return length, f"{int((lengths > length).sum())} of {len(lengths)} conversations are longer"


def _window(max_length: int, train: Sequence[Conversation] | None) -> tuple[int | None, str]:
    """Return a multiple of `WINDOW_STEP` that `WINDOW_SHARE` of the conversations fit in: few show what stands farther back."""
    if train is None:
        return None, "for data yet to be made"
    lengths = np.minimum(index_of(train).lengths, max_length)
    length = int(np.quantile(lengths, WINDOW_SHARE, method="inverted_cdf"))
    return WINDOW_STEP * math.ceil(length / WINDOW_STEP), f"{WINDOW_SHARE:.0%} of the conversations fit in {length} tokens"


def _vocabulary(size: int, train: Sequence[Conversation] | None, init: str | None = None) -> tuple[int | None, str]:
    """Return the next multiple of `VOCABULARY_STEP` above the tokens that answers use; None: all of the target's."""
    if init is not None:
        start = read_metadata(locate_artifact(init))
        return start.draft_vocab_size if start.draft_vocabulary == "reduced" else None, f"as of {init}"
    used = LARGEST_VOCABULARY if train is None else int(np.count_nonzero(index_of(train).answer_counts))
    wanted = min(LARGEST_VOCABULARY, VOCABULARY_STEP * math.ceil(max(1, used) / VOCABULARY_STEP))
    if wanted >= size:
        return None, f"all of the target's {size}"
    return wanted, "for data yet to be made" if train is None else f"for answers of {used} different tokens"


def choose_vocabulary(size: int | None, target: Target, conversations: Sequence[Conversation]) -> DraftVocabulary | None:
    """Return the `size` most frequent answer tokens, ties by the lower id; those that end an answer are always among them.

    None: the draft has all tokens.
    """
    if size is None:
        return None
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

"""The draft vocabulary of a training run: by counts, or by the target's mass over a sample of the run's conversations.

By mass it costs a forward of the target over at most `TRAIN_SAMPLE` training and `HELD_OUT_SAMPLE` held-out conversations,
shared by the processes; where training reads a cache of hidden states, those of the training conversations come from it. The
choice is kept in the output folder, so that a resumed run has the tokens that its checkpoints were trained with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from configs.runtime.resumable import Journal, fingerprint, fingerprint_of
from configs.schema.training import DistillConfig, HeadsConfig
from distill.cache.reader import TargetCache
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import Conversation
from distill.signals import SignalSource, signal_source
from distill.student.vocabulary import MassChoice, choose_by_mass, log_choice, most_frequent_answer_tokens, target_mass
from heads.frozen.loading import Target
from heads.frozen.processes import share_of
from heads.vocabulary import DraftVocabulary

TRAIN_SAMPLE, HELD_OUT_SAMPLE = 512, 256  # conversations, evenly spaced
JOURNAL, KEY = "draft_vocabulary.jsonl", "choice"


def choose_vocabulary(
    config: DistillConfig | HeadsConfig,
    target: Target,
    train: Sequence[Conversation],
    held_out: Sequence[Conversation],
    accelerator: Accelerator,
    cache: TargetCache | None,
) -> MassChoice:
    """Return the vocabulary that the config asks for, the same in all processes; the report of one by counts is empty.

    Raises:
        ConfigError: the size cannot be had.
        InputError: there are no held-out answers within data.max_length, or the output cannot be written.
    """
    section = config.head if isinstance(config, HeadsConfig) else config.student
    size = section.draft_vocab_size
    if section.draft_vocab_by is None:
        return MassChoice(vocabulary=None if size is None else most_frequent_answer_tokens(train, size, target), report={})
    length = config.data.max_length
    job = fingerprint(
        size,
        config.num_speculative_tokens if size is None else None,
        length,
        target.identity.to_dict(),
        _digest(train, TRAIN_SAMPLE, length),
        _digest(held_out, HELD_OUT_SAMPLE, length),
    )
    journal = Journal(Path(config.output) / JOURNAL, job)
    (kept,) = broadcast_object_list([journal.read().get(KEY) if accelerator.is_main_process else None])
    if kept is None:
        if cache is not None and cache.manifest.layout.kind != "last_hidden":
            cache = None
        chosen_from = _mass(target, train, TRAIN_SAMPLE, length, signal_source(target, cache=cache), accelerator)
        measured_on = _mass(target, held_out, HELD_OUT_SAMPLE, length, signal_source(target), accelerator)
        choice = choose_by_mass(chosen_from, measured_on, size, target, config.num_speculative_tokens)
        ids = None if choice.vocabulary is None else choice.vocabulary.token_ids_W.tolist()
        kept = {"report": choice.report, "token_ids": ids}
        if accelerator.is_main_process:
            journal.append(KEY, kept)
    log_choice(kept["report"])
    vocabulary = None
    if kept["token_ids"] is not None:
        vocabulary = DraftVocabulary(token_ids_W=torch.tensor(kept["token_ids"]), target_vocab_size=target.vocab_size)
    return MassChoice(vocabulary=vocabulary, report=kept["report"])


def _mass(
    target: Target,
    rows: Sequence[Conversation],
    most: int,
    max_length: int,
    source: SignalSource,
    accelerator: Accelerator,
) -> dict[str, Tensor]:
    """Return the mass of a sample of conversations, each process reading its share."""
    dataset, sample = _sample(rows, most, max_length)
    share = share_of(target.group, accelerator.state)
    parts = share.gather(
        [target_mass(target, dataset, sample[share.number :: share.count], lambda batch: source.read(batch).dense.final_BTE)]
    )
    kinds = sorted({kind for part in parts for kind in part})
    return {kind: torch.stack([part[kind] for part in parts if kind in part]).sum(0) for kind in kinds}


def _sample(rows: Sequence[Conversation], most: int, max_length: int) -> tuple[ConversationDataset, list[int]]:
    dataset = ConversationDataset(rows, max_length)
    return dataset, np.linspace(0, len(dataset) - 1, min(most, len(dataset))).astype(int).tolist()


def _digest(rows: Sequence[Conversation], most: int, max_length: int) -> str:
    """Return a hash of all that a sample brings to the choice."""
    dataset, sample = _sample(rows, most, max_length)
    chosen = (rows[int(dataset.numbers[index])] for index in sample)
    return fingerprint_of([row.category, row.user_text, row.prompt_ids, row.answer_ids] for row in chosen)

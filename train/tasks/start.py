"""What a training begins with: its draft vocabulary, and the head's artifact that it goes on from (`init`).

A vocabulary by the target's mass costs a forward of the target over at most `TRAIN_SAMPLE` training and `HELD_OUT_SAMPLE`
held-out conversations, shared by the processes; where training reads a cache of hidden states, those of the training
conversations come from it. Every choice is kept in the output folder: a resumed run has the tokens that its checkpoints have.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from configs.runtime.errors import ConfigError, InputError, first_line
from configs.runtime.files import read_object, write_json
from configs.runtime.resumable import fingerprint, fingerprint_of
from configs.schema.training import DistillConfig, HeadsConfig
from distill.cache.reader import TargetCache
from distill.dataset.batches import ConversationDataset
from distill.dataset.conversations import Conversation, index_of
from distill.signals import SignalSource
from distill.student.vocabulary import MassChoice, choose_by_mass, log_choice, most_frequent_answer_tokens, target_mass
from heads.artifact import read_training_prompts
from heads.frozen.loading import Target
from heads.frozen.processes import share_of
from heads.metadata import (
    METADATA_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    Metadata,
    check_made_for,
    locate_artifact,
    read_metadata,
)
from heads.modules.output_head import HeadModule
from heads.vocabulary import DraftVocabulary, read_draft_vocabulary
from train.loop.checkpoints import resumes, writing

log = logging.getLogger("draftsmith")

TRAIN_SAMPLE, HELD_OUT_SAMPLE = 512, 256  # conversations, evenly spaced
BY_MASS = "draft_vocabulary.json"
# In these a head may differ from the one that it starts from: they are of training, of weights at the start, or say how far
# back attention reads
MAY_DIFFER = {"draft_vocab_size", "draft_vocab_by", "depth_decay", "init_block", "window"}


def choose_vocabulary(
    config: DistillConfig | HeadsConfig,
    target: Target,
    train: Sequence[Conversation],
    held_out: Sequence[Conversation],
    accelerator: Accelerator,
    cache: TargetCache | None,
) -> MassChoice:
    """Return the vocabulary that the config asks for, the same in all processes; the report of one by counts is empty."""
    section = config.head if isinstance(config, HeadsConfig) else config.student
    size = section.draft_vocab_size
    if section.draft_vocab_by is None:
        return MassChoice(vocabulary=None if size is None else _by_counts(config, size, target, train, accelerator), report={})
    length = config.data.max_length
    job = fingerprint(
        size,
        config.num_speculative_tokens if size is None else None,
        length,
        target.identity.to_dict(),
        _digest(train, TRAIN_SAMPLE, length),
        _digest(held_out, HELD_OUT_SAMPLE, length),
    )
    path = Path(config.output) / BY_MASS
    there = accelerator.is_main_process and path.is_file()
    (kept,) = broadcast_object_list([read_object(path, "draft vocabulary") if there else None])
    if kept is None or not (kept["job"] == job or resumes(config.schedule, path.parent)):
        if cache is not None and cache.manifest.layout.kind != "last_hidden":
            cache = None
        chosen_from = _mass(target, train, TRAIN_SAMPLE, length, SignalSource(target, cache=cache), accelerator)
        measured_on = _mass(target, held_out, HELD_OUT_SAMPLE, length, SignalSource(target), accelerator)
        choice = choose_by_mass(chosen_from, measured_on, size, target, config.num_speculative_tokens)
        ids = None if choice.vocabulary is None else choice.vocabulary.token_ids_W.tolist()
        kept = {"job": job, "report": choice.report, "token_ids": ids}
        if accelerator.is_main_process:
            with writing(path):
                write_json(path, kept)
    log_choice(kept["report"])
    vocabulary = None
    if kept["token_ids"] is not None:
        vocabulary = DraftVocabulary(token_ids_W=torch.tensor(kept["token_ids"]), target_vocab_size=target.vocab_size)
    return MassChoice(vocabulary=vocabulary, report=kept["report"])


def _by_counts(
    config: DistillConfig | HeadsConfig, size: int, target: Target, train: Sequence[Conversation], accelerator: Accelerator
) -> DraftVocabulary:
    """Choose the tokens that answers use most; a resumed run keeps those of its weights' rows, though its data be others."""
    path = Path(config.output) / VOCABULARY_FILE
    if resumes(config.schedule, path.parent) and path.is_file() and len(kept := read_draft_vocabulary(path)) == size:
        return kept
    vocabulary = most_frequent_answer_tokens(train, size, target)
    if accelerator.is_main_process:
        scratch = path.with_suffix(".partial")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            vocabulary.write(scratch)
            scratch.replace(path)
    return vocabulary


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


@dataclass(frozen=True, kw_only=True)
class InitialHead:
    """A head's artifact, read to be trained on; its draft vocabulary is kept, as the weights' rows are those of its tokens."""

    folder: Path
    metadata: Metadata
    vocabulary: DraftVocabulary | None
    tensors: dict[str, Tensor]

    def fill(self, head: nn.Module) -> None:
        """Give a head that was built by the run's config the artifact's weights, if the config describes this head."""
        built = cast(HeadModule, head)
        theirs: dict[str, Any] = {**(self.metadata.head or {}), "kind": self.metadata.kind}
        if self.metadata.hidden_states is not None:
            theirs["taps"] = self.metadata.hidden_states.taps
        ours = {**built.settings.model_dump(mode="json"), "taps": list(built.taps)}
        for key in [name for name in ("kind", *ours) if name in theirs and name not in MAY_DIFFER]:
            if ours[key] != theirs[key]:
                raise ConfigError(
                    f"init: {self.folder} is a head with {key} {theirs[key]}, and head.{key} is {ours[key]}: give head what "
                    "the artifact has, or set init to null"
                )
        try:
            head.load_state_dict(self.tensors)
        except RuntimeError as error:
            raise ConfigError(
                f"init: {self.folder} has not the weights of the head that `head` describes: {' '.join(str(error).split())}"
            ) from error


def read_initial_head(name: str, target: Target) -> InitialHead:
    """Read a head's artifact from a folder, its training's, or the Hub; of a target of other weights it only warns."""
    folder = locate_artifact(name)
    metadata = read_metadata(folder)
    if metadata.kind == "draft_lm":
        raise InputError(
            f"init: {folder} is a draft LM, and this trains a head; train/distill.py goes on from one by student.init model "
            "and student.path"
        )
    for warning in check_made_for(metadata, target.identity, folder, allow_target_mismatch=True):
        log.warning("%s", warning)
    vocabulary = None
    if metadata.draft_vocabulary == "reduced":
        kept = read_draft_vocabulary(folder / VOCABULARY_FILE)
        vocabulary = DraftVocabulary(token_ids_W=kept.token_ids_W, target_vocab_size=target.vocab_size)
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder} is damaged: {first_line(error)}") from error
    return InitialHead(folder=folder, metadata=metadata, vocabulary=vocabulary, tensors=tensors)


def training_prompts(train: Sequence[Conversation], start: Path | None) -> np.ndarray | None:
    """Return hashes of the prompts trained on, int64 `[N]`, with those of the folder that the run started from.

    None where that is an artifact that does not say, as none does that was published; a plain model counts as trained on none.
    """
    hashes = index_of(train).user_texts
    if start is None or not (start / METADATA_FILE).is_file():
        return hashes
    earlier = read_training_prompts(start)
    return None if earlier is None else np.concatenate([hashes, earlier])

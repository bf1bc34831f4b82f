"""What a training begins with: its draft vocabulary, and the head's artifact that it goes on from (`init`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from configs.runtime.errors import ConfigError, InputError, first_line
from configs.schema.training import DistillConfig, HeadsConfig
from distill.dataset.conversations import Conversation, index_of
from distill.vocabulary import most_frequent_answer_tokens
from heads.artifact import read_training_prompts
from heads.frozen.loading import Target
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

# In these a head may differ from the one that it starts from: they are of training, of weights at the start, or say how far
# back attention reads
MAY_DIFFER = {"draft_vocab_size", "depth_decay", "init_block", "window"}


def choose_vocabulary(
    config: DistillConfig | HeadsConfig, target: Target, train: Sequence[Conversation], accelerator: Accelerator
) -> DraftVocabulary | None:
    """Return the most frequent tokens of the training answers, kept in the output folder; None where the draft has all tokens.

    A resumed run has the tokens that its checkpoints' rows are of, though its data be others.
    """
    section = config.head if isinstance(config, HeadsConfig) else config.student
    size = section.draft_vocab_size
    if size is None:
        return None
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

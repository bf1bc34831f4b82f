"""The artifact that a head's training starts from (`init` of `train/heads.py`), in place of new weights.

Its draft vocabulary is kept: the rows of the head's weights are those of its tokens. A target of other weights is only warned
of, because a head may follow a target that was trained further; one with another tokenizer is refused.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from configs.runtime.errors import ConfigError, InputError, first_line
from heads.artifact import read_training_prompts
from heads.frozen.loading import Target
from heads.hub import locate_artifact
from heads.metadata import VOCABULARY_FILE, WEIGHTS_FILE, Metadata, check_made_for, hash_artifact, read_metadata
from heads.modules.output_head import HeadModule
from heads.vocabulary import DraftVocabulary, read_draft_vocabulary

log = logging.getLogger("draftsmith")
# Settings that change what is learnt, or the weights at the start, and not what the weights compute
OF_TRAINING = {"draft_vocab_size", "draft_vocab_by", "depth_decay", "init_block"}


@dataclass(frozen=True, kw_only=True)
class InitialHead:
    """A head's artifact, read to be trained on."""

    folder: Path
    metadata: Metadata
    vocabulary: DraftVocabulary | None
    tensors: dict[str, Tensor]

    def fill(self, head: nn.Module) -> None:
        """Give a head that was built by the run's config, on any device, the artifact's weights.

        Raises:
            ConfigError: the config describes another family, other taps or other sizes.
        """
        built = cast(HeadModule, head)
        theirs: dict[str, Any] = {**(self.metadata.head or {}), "kind": self.metadata.kind}
        if self.metadata.hidden_states is not None:
            theirs["taps"] = self.metadata.hidden_states.taps
        ours = {**built.settings.model_dump(mode="json"), "taps": list(built.taps)}
        for key in [name for name in ("kind", *ours) if name in theirs and name not in OF_TRAINING]:
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
    """Read a head's artifact.

    Args:
        name: its folder, that of its training, or a name on the Hub.
        target: that it is to be trained on.

    Raises:
        InputError: it is no head's artifact, is damaged, or is for another tokenizer or chat template.
    """
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


def hash_initial_head(name: str) -> str:
    """Return the hash of the artifact.

    Raises:
        InputError: it is none, or one of its files cannot be read.
    """
    folder = locate_artifact(name)
    return hash_artifact(folder, read_metadata(folder))


def add_earlier_prompts(hashes: np.ndarray, start: str | None) -> np.ndarray:
    """Return hashes of the prompts trained on, int64 `[N]`, with those that the artifact started from was trained on.

    Args:
        hashes: of this run.
        start: the artifact, or a model in a folder, which does not say; None: the run started from none.
    """
    earlier = None if start is None or not Path(start).is_dir() else read_training_prompts(start)
    return hashes if earlier is None else np.concatenate([hashes, earlier])

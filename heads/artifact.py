"""The artifact: a folder with `draftsmith.json`, the draft's weights, and for a draft LM all that transformers needs.

Writing is atomic. Loading compares the target, tokenizer and chat template the draft was made for with those at hand and
refuses any difference, because such a draft decodes without an error and is never accepted. Any other causal LM with the
target's tokenizer can be loaded as a draft too. A draft LM with a reduced vocabulary is written with its whole head, so that
other programs need not know of the reduction; `draft_vocabulary.safetensors` lists the rows that our decoder keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import new_folder, write_json
from configs.runtime.redaction import mask_secrets
from heads.device import choose_device
from heads.families.registry import FAMILIES, serve
from heads.frozen.hidden_states import check_taps
from heads.frozen.identity import TargetIdentity
from heads.frozen.loading import load_with, move
from heads.frozen.weights import UNREADABLE, cause_of, loader_of, read_tensors
from heads.inference.lean_forward import run_alike
from heads.inference.model_checks import check_rolls_back, check_split
from heads.metadata import (
    METADATA_FILE,
    PROMPTS_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    Metadata,
    check_made_for,
    hash_artifact,
    locate_artifact,
    read_metadata,
    untrained_metadata,
)
from heads.modules.output_head import HeadModule
from heads.proposers.draft_lm import DraftLM
from heads.proposers.protocol import Proposer
from heads.vocabulary import DraftVocabulary, keep_head_rows, read_draft_vocabulary


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A loaded artifact, ready to propose."""

    metadata: Metadata
    proposer: Proposer
    num_parameters: int
    sha256: str  # `heads.metadata.hash_artifact`
    warnings: list[str]


def save_draft_lm(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    metadata: Metadata,
    vocabulary: DraftVocabulary | None = None,
    training_prompts: np.ndarray | None = None,
) -> None:
    """Write a draft LM, its head whole, as an artifact that `AutoModelForCausalLM.from_pretrained(folder)` also loads.

    Args:
        training_prompts: hashes of the prompts it was trained on, int64 `[N]`; None: unknown.

    Raises:
        InputError: the folder cannot be written.
    """
    with new_folder(folder) as scratch:
        model.save_pretrained(scratch, max_shard_size="1TB")
        tokenizer.save_pretrained(scratch)
        write_rest(scratch, metadata, vocabulary, training_prompts)


def save_head(
    folder: Path,
    head: torch.nn.Module,
    metadata: Metadata,
    vocabulary: DraftVocabulary | None = None,
    training_prompts: np.ndarray | None = None,
) -> None:
    """Write a head on a frozen target as an artifact; what it borrows from the target is not written. See `save_draft_lm`."""
    with new_folder(folder) as scratch:
        tensors = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
        save_file(tensors, scratch / WEIGHTS_FILE)
        write_rest(scratch, metadata, vocabulary, training_prompts)


def write_rest(
    folder: Path, metadata: Metadata, vocabulary: DraftVocabulary | None, training_prompts: np.ndarray | None = None
) -> None:
    if vocabulary is not None:
        vocabulary.write(folder / VOCABULARY_FILE)
    if training_prompts is not None:
        save_file({"user_texts": torch.from_numpy(np.unique(training_prompts))}, folder / PROMPTS_FILE)
    write_json(folder / METADATA_FILE, mask_secrets(metadata.model_dump(mode="json")))


def read_training_prompts(folder: str | Path) -> np.ndarray | None:
    """Return the hashes of the prompts that an artifact was trained on, int64 `[N]`; None where it does not say."""
    path = locate_artifact(folder) / PROMPTS_FILE
    if not path.is_file():
        return None
    tensors = read_tensors(path)
    if "user_texts" not in tensors:
        raise InputError(f"{path} holds no user_texts")
    return tensors["user_texts"].numpy()


def load_draft(
    folder: str | Path,
    identity: TargetIdentity,
    target: PreTrainedModel,
    *,
    allow_target_mismatch: bool = False,
    device: str | None = None,
) -> Draft:
    """Load an artifact, or any causal LM with the target's tokenizer, for a target, in its dtype.

    Args:
        folder: the artifact or model, or its name on the Hub (`heads.metadata.locate_artifact`).
        identity: of the target at hand.
        allow_target_mismatch: make the refusal of another target a warning. Another tokenizer stays refused.
        device: where a draft LM is to run; None: where the target is.

    Raises:
        InputError: it is neither, is damaged, or was made for another target, tokenizer or chat template; or there is no such
            device, or it is given for a head.
    """
    name, folder = folder, locate_artifact(folder)
    if (folder / METADATA_FILE).is_file() or not (folder / "config.json").is_file():
        metadata = read_metadata(folder)
        warnings = check_made_for(metadata, identity, folder, allow_target_mismatch)
    else:
        metadata = untrained_metadata(folder, identity)
        warnings = [f"the draft {name} is a model as it was found, not trained by draftsmith for {identity.name}"]
    model: torch.nn.Module
    proposer: Proposer
    if metadata.kind == "draft_lm":
        proposer = _load_draft_lm(folder, metadata, target, device)
        model = proposer.model
        try:
            run_alike(proposer.model, target)
        except InputError as error:
            warnings.append(f"the draft runs by transformers' forward, slower than its target's: {error}")
    elif device is not None:
        raise InputError(
            f"draft_device {device}: {folder} holds a head of kind {metadata.kind!r}, which reads the target's states and "
            "borrows its weights, so it runs where the target does; leave draft_device out"
        )
    else:
        model, proposer = _load_head(folder, metadata, target)
    return Draft(
        metadata=metadata,
        proposer=proposer,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        sha256=hash_artifact(folder),
        warnings=warnings,
    )


def _load_draft_lm(folder: Path, metadata: Metadata, target: PreTrainedModel, device: str | None) -> DraftLM:
    try:
        load = loader_of(folder, target.dtype)
        model = load_with(target.config._attn_implementation, lambda attention: load(attn_implementation=attention))
    except UNREADABLE as error:
        raise InputError(f"{folder} is damaged: {cause_of(folder, error)}") from error
    place, home = (target.device, None) if device is None else (choose_device(device, setting="draft_device"), target.device)
    move(model, place).eval().requires_grad_(False)
    check_rolls_back(model)
    check_split(model)
    target_vocab_size = target.config.get_text_config().vocab_size
    if metadata.draft_vocabulary == "target":
        if (rows := model.config.get_text_config().vocab_size) < metadata.draft_vocab_size:
            words = f"its model has {rows} tokens, while {METADATA_FILE} says {metadata.draft_vocab_size}"
            raise InputError(f"{folder} is damaged: {words}")
        return DraftLM(model, min(metadata.draft_vocab_size, target_vocab_size), home=home)
    vocabulary = load_vocabulary(folder, metadata, target_vocab_size)
    keep_head_rows(model, vocabulary)
    return DraftLM(model, target_vocab_size, vocabulary, home)


def head_settings(folder: Path, metadata: Metadata) -> Any:
    """Return the settings (`configs.schema.heads`) of an artifact's head."""
    if metadata.kind not in FAMILIES:
        raise InputError(f"{folder} holds a draft of kind {metadata.kind!r}; known are draft_lm, {', '.join(FAMILIES)}")
    try:
        return FAMILIES[metadata.kind].settings.model_validate(metadata.head)
    except ValidationError as error:
        raise InputError(f"{folder} is damaged: {first_line(error)}") from error


def _load_head(folder: Path, metadata: Metadata, target: PreTrainedModel) -> tuple[torch.nn.Module, Proposer]:
    settings = head_settings(folder, metadata)
    family = FAMILIES[metadata.kind]
    tensors = read_tensors(folder / WEIGHTS_FILE)
    check_rolls_back(target)
    vocabulary = None
    if metadata.draft_vocabulary == "reduced":
        vocabulary = load_vocabulary(folder, metadata, target.config.get_text_config().vocab_size)
    head = family.build(settings, target, vocabulary)
    try:
        head.load_state_dict(tensors)
    except RuntimeError as error:
        raise InputError(f"{folder} does not hold the weights of its head: {' '.join(str(error).split())}") from error
    check_taps(target, cast(HeadModule, head).taps)
    served = serve(head, target)
    return served, family.propose(served, target.device)


def load_vocabulary(folder: Path, metadata: Metadata, target_vocab_size: int) -> DraftVocabulary:
    """Return the draft vocabulary of an artifact that has a reduced one."""
    vocabulary = read_draft_vocabulary(folder / VOCABULARY_FILE)
    if len(vocabulary) != metadata.draft_vocab_size:
        words = f"holds {len(vocabulary)} tokens, while {METADATA_FILE} says {metadata.draft_vocab_size}"
        raise InputError(f"{folder} is damaged: {VOCABULARY_FILE} {words}")
    if (highest := int(vocabulary.token_ids_W[-1])) >= target_vocab_size:
        raise InputError(f"{folder}: its draft vocabulary holds token {highest}, the target at hand has {target_vocab_size}")
    return DraftVocabulary(token_ids_W=vocabulary.token_ids_W, target_vocab_size=target_vocab_size)

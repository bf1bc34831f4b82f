"""The artifact: a folder with `draftsmith.json`, the draft's weights, and for a draft LM all that transformers needs.

Writing is atomic. Loading compares the target, tokenizer and chat template the draft was made for with those at hand and
refuses what differs, because such a draft decodes without an error and is accepted never.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from configs.errors import InputError
from configs.files import new_folder, read_json, write_json
from heads.draft_lm import DraftLM
from heads.identity import TargetIdentity, hash_files
from heads.kv_cache import check_rolls_back
from heads.lm_head import check_split
from heads.proposer import Proposer

METADATA_FILE = "draftsmith.json"
WEIGHTS_FILE = "model.safetensors"


class HiddenStates(BaseModel):
    """Which of the target's hidden states a draft reads, in words that leave no room for an off-by-one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    convention: Literal["h_0 is the embedding output, h_i the residual stream after block i (before the final norm)"] = (
        "h_0 is the embedding output, h_i the residual stream after block i (before the final norm)"
    )
    taps: list[int]
    concat_order: list[str]
    last_is_post_norm: bool


class Metadata(BaseModel):
    """The content of `draftsmith.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    kind: Literal["draft_lm"]
    target: dict[str, Any]
    hidden_states: HiddenStates | None = None  # None: the draft reads tokens only
    draft_vocab_size: int = Field(ge=1)
    draft_vocabulary: Literal["target"] = "target"  # the draft's ids are the target's
    num_speculative_tokens: int = Field(ge=1)
    training: dict[str, Any]  # the resolved config it was trained with
    provenance: dict[str, Any]  # command, versions, git state, step and held-out score


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A loaded artifact, ready to propose."""

    metadata: Metadata
    proposer: Proposer
    num_parameters: int
    sha256: str  # over weights and metadata
    warnings: list[str]


def save_draft_lm(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, metadata: Metadata) -> None:
    """Write a draft LM as an artifact that `AutoModelForCausalLM.from_pretrained(folder)` also loads.

    Raises:
        InputError: the folder cannot be written.
    """
    with new_folder(folder) as scratch:
        model.save_pretrained(scratch, max_shard_size="1TB")
        tokenizer.save_pretrained(scratch)
        write_json(scratch / METADATA_FILE, metadata.model_dump(mode="json"))


def load_draft(
    folder: str | Path, identity: TargetIdentity, target: PreTrainedModel, *, allow_target_mismatch: bool = False
) -> Draft:
    """Load an artifact for a target, on the target's device and in its dtype.

    Args:
        folder: the artifact.
        identity: who the target at hand is.
        target: the target's model.
        allow_target_mismatch: make the refusal of another target a warning. Another tokenizer stays refused.

    Raises:
        InputError: it is no artifact, is damaged, or was made for another target, tokenizer or chat template.
    """
    folder = Path(folder)
    metadata = read_metadata(folder)
    made_for = TargetIdentity.from_dict(metadata.target, str(folder / METADATA_FILE))
    differences = made_for.differences(identity)
    warnings = []
    if differences:
        words = f"{folder} was trained for {made_for.name}; what differs from {identity.name} at hand: {', '.join(differences)}"
        if "tokenizer" in differences or not allow_target_mismatch:
            raise InputError(words + ("" if "tokenizer" in differences else " (allow_target_mismatch makes this a warning)"))
        warnings.append(words)
    model, proposer = LOADERS[metadata.kind](folder, metadata, target)
    return Draft(
        metadata=metadata,
        proposer=proposer,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        sha256=hash_files([folder / WEIGHTS_FILE, folder / METADATA_FILE]),
        warnings=warnings,
    )


def read_metadata(folder: Path) -> Metadata:
    """Return the checked content of an artifact's `draftsmith.json`.

    Raises:
        InputError: the folder holds none, or it does not follow the format.
    """
    path = folder / METADATA_FILE
    if not path.is_file():
        raise InputError(f"{folder} is no artifact: it holds no {METADATA_FILE}")
    content = read_json(path, "artifact metadata")
    try:
        return Metadata.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the top level"
        raise InputError(f"{path}: {where}: {first['msg']}") from error


def _load_draft_lm(folder: Path, metadata: Metadata, target: PreTrainedModel) -> tuple[PreTrainedModel, Proposer]:
    if not (folder / WEIGHTS_FILE).is_file():
        raise InputError(f"{folder} is damaged: it holds no {WEIGHTS_FILE}")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=target.dtype, attn_implementation=target.config._attn_implementation, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{folder} is damaged: {str(error).splitlines()[0]}") from error
    torch.nn.Module.to(model, device=target.device, dtype=target.dtype)
    model.eval().requires_grad_(False)
    check_rolls_back(model)
    check_split(model)
    return model, DraftLM(model, vocab_size=min(metadata.draft_vocab_size, target.config.get_text_config().vocab_size))


LOADERS: dict[str, Callable[[Path, Metadata, PreTrainedModel], tuple[torch.nn.Module, Proposer]]] = {"draft_lm": _load_draft_lm}

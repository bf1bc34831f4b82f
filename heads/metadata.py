"""What an artifact says of itself: `draftsmith.json`, for whom the draft was made, and the artifact's hash; and where it is.

A draft is named by a folder, or by a repository on the Hub, of which only data is fetched into the Hub's own cache: JSON,
safetensors, tokenizers. No code and nothing pickled, except the weights of a draft to be imported, which some programs keep in
a `.bin` (read with `weights_only`). How the Hub is reached (`HF_ENDPOINT`, `HF_TOKEN`, ...) is huggingface_hub's own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any, Literal

from httpx2 import HTTPError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import AutoConfig, AutoTokenizer

from configs.runtime.errors import InputError, first_finding, first_line
from configs.runtime.files import TORCH_FILE, check_readable, read_json, sha256_of
from configs.runtime.run_record import fingerprint
from heads.frozen.identity import TargetIdentity, hash_tokenizer
from heads.frozen.weights import UNREADABLE, cause_of

METADATA_FILE = "draftsmith.json"
WEIGHTS_FILE = "model.safetensors"
VOCABULARY_FILE = "draft_vocabulary.safetensors"
PROMPTS_FILE = "training_prompts.safetensors"  # hashes of the prompts trained on; not published
# What loaders read of a draft, here and in transformers: this is fetched, and hashed.
DATA_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "vocab.txt", "merges.txt", "additional_chat_templates/*.jinja")
RECORDS = {"report.json", "publication.json"}  # lie beside a published draft and name its hash
SUBFOLDERS = "*/*"  # the exports of a published draft, for which others come
HUB_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?")


class HiddenStates(BaseModel):
    """Which of the target's hidden states a draft reads, and how they are counted."""

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
    kind: str  # draft_lm, or a family of `heads.families.registry`
    target: dict[str, Any]
    hidden_states: HiddenStates | None = None  # None: the draft reads tokens only
    head: dict[str, Any] | None = None  # a head's settings (`configs.schema.heads`), nothing left open; None for a draft LM
    draft_vocab_size: int = Field(ge=1)  # tokens the draft can propose
    draft_vocabulary: Literal["target", "reduced"] = "target"  # target: all of its ids; reduced: see VOCABULARY_FILE
    num_speculative_tokens: int = Field(ge=1)
    training: dict[str, Any]  # the resolved config it was trained with
    provenance: dict[str, Any]  # command, versions, git state, step and held-out score


def head_metadata(
    settings: Any,
    taps: Sequence[int],
    identity: TargetIdentity,
    vocabulary: Sized | None,
    vocab_size: int,
    *,
    num_speculative_tokens: int,
    training: dict[str, Any],
    provenance: dict[str, Any],
) -> Metadata:
    """Return the metadata of a head, by its settings (`configs.schema.heads`), on a target with so many tokens."""
    return Metadata(
        kind=settings.kind,
        target=identity.to_dict(),
        hidden_states=HiddenStates(taps=list(taps), concat_order=[f"h_{tap}" for tap in taps], last_is_post_norm=True),
        head=settings.model_dump(mode="json"),
        draft_vocab_size=vocab_size if vocabulary is None else len(vocabulary),
        draft_vocabulary="target" if vocabulary is None else "reduced",
        num_speculative_tokens=num_speculative_tokens,
        training=training,
        provenance=provenance,
    )


def locate_artifact(name: str | Path) -> Path:
    """Return the folder of an artifact, fetched where needed; an InputError where there is none.

    It is named by itself, by the folder of a training with an `artifact/` in it, or, where no folder has that name, as
    `owner/name` or `owner/name@revision` on the Hub; the revision is a branch, a tag or a commit.
    """
    folder = _locate(str(name), DATA_FILES)
    trained = folder / "artifact"
    return trained if (trained / METADATA_FILE).is_file() and not (folder / METADATA_FILE).is_file() else folder


def locate_external(name: str | Path) -> Path:
    return _locate(str(name), (*DATA_FILES, TORCH_FILE))


def _locate(name: str, patterns: tuple[str, ...]) -> Path:
    found = HUB_NAME.fullmatch(name)
    if Path(name).exists() or found is None:  # a name that is no folder either is refused by its reader
        return Path(name)
    repository, revision = found["repository"], found["revision"]
    try:
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=[SUBFOLDERS])
        )
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        raise InputError(
            f"{name} is no folder here, and could not be fetched from the Hub as owner/name or owner/name@revision: "
            f"{first_line(error)}"
        ) from error


def read_metadata(folder: Path) -> Metadata:
    path = folder / METADATA_FILE
    if folder.is_dir():
        check_readable(folder)
    if not path.is_file():
        words = f"{folder} is no artifact: it holds no {METADATA_FILE}"
        if (folder / "config.json").is_file():
            words += (
                "; eval/run.py and engines take a model as it is, while export, push and a gate's --artifact are for drafts "
                "that were trained or imported here"
            )
        raise InputError(words)
    try:
        return Metadata.model_validate(read_json(path, "artifact metadata"))
    except ValidationError as error:
        raise InputError(f"{path}: {first_finding(error, 'the top level')}") from error


def hash_artifact(folder: Path) -> str:
    """Return the one hash of a draft: over names and contents, read anew, of the files that any loader reads (`DATA_FILES`)."""
    names = {path.relative_to(folder).as_posix() for pattern in DATA_FILES for path in folder.glob(pattern)}
    return fingerprint({name: sha256_of(folder / name) for name in names - RECORDS})


def hash_together(hashes: Sequence[str]) -> str:
    """Return the one hash of several artifacts that draft together, in their order; a single one keeps its own."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def agreed(hashes: Iterable[str]) -> str:
    """Return the hash that all share; where they differ, all of them joined, which is equal to none."""
    return ", ".join(dict.fromkeys(hashes))


def check_made_for(metadata: Metadata, identity: TargetIdentity, folder: Path, allow_target_mismatch: bool) -> list[str]:
    """Refuse an artifact that was made for another target; return a warning in place of the refusals that are allowed."""
    made_for = TargetIdentity.from_dict(metadata.target, str(folder / METADATA_FILE))
    differences = made_for.differences(identity)
    if not differences:
        return []
    words = f"{folder} was trained for {made_for.name}; what differs from {identity.name} at hand: {', '.join(differences)}"
    if "tokenizer" in differences or not allow_target_mismatch:
        raise InputError(words + ("" if "tokenizer" in differences else " (allow_target_mismatch makes this a warning)"))
    return [words]


def untrained_metadata(folder: Path, identity: TargetIdentity) -> Metadata:
    """Return the metadata of a causal LM that is no artifact, if its tokenizer is the target's."""
    check_readable(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except UNREADABLE as error:
        raise InputError(
            f"{folder} holds neither {METADATA_FILE} nor a causal LM with its tokenizer ({cause_of(folder, error)}); "
            "a draft of another program is made an artifact by draftsmith import"
        ) from error
    if hash_tokenizer(tokenizer) != identity.tokenizer_sha256:
        raise InputError(f"{folder} cannot draft for {identity.name}: its tokenizer is another; take a model that shares it")
    return Metadata(
        kind="draft_lm",
        target=identity.to_dict(),
        draft_vocab_size=config.get_text_config().vocab_size,
        num_speculative_tokens=1,
        training={},
        provenance={},
    )

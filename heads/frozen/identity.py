"""The identity of a target: hashes of its weights, its tokenizer and its chat template.

A draft fits one target only. Every artifact and report carries these hashes, and loading compares them: two tokenizers of equal
size, or two checkpoints of equal name, would otherwise be exchanged unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase

from configs.runtime.errors import InputError
from configs.runtime.files import downloads_folder, sha256_of, write_text
from configs.runtime.resumable import fingerprint
from heads.frozen.checkpoint_files import INDEX_FILE, SINGLE_FILE, files_by_key

REMEMBERED_BYTES = 2**27  # smaller files are hashed in a blink
START_BYTES = 2**20
SHA256 = re.compile("[0-9a-f]{64}")
WEIGHT_PATTERNS = ("*.safetensors", "*.gguf")


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """What an artifact records of its target. Hashes are SHA-256 in hex."""

    name: str
    revision: str | None
    weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str) -> TargetIdentity:
        """Read back `to_dict`; `where` names the file in error messages.

        Raises:
            InputError: a field is missing or no string.
        """
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            finding = error.errors(include_url=False)[0]
            name = ".".join(map(str, finding["loc"]))
            raise InputError(f"{where}: the target's identity is damaged: {name}: {finding['msg']}") from error

    def differences(self, other: TargetIdentity) -> list[str]:
        """Name what differs from `other`, in words. Names and revisions may differ; contents may not."""
        words = {
            "weights_sha256": "target weights",
            "tokenizer_sha256": "tokenizer",
            "chat_template_sha256": "chat template",
        }
        return [word for field, word in words.items() if getattr(self, field) != getattr(other, field)]


def hash_files(paths: Iterable[Path]) -> str:
    """Return one hash over the contents of files, in the order of their names; for large files see `remembered_sha256`."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        total.update(bytes.fromhex(remembered_sha256(path)))
    return total.hexdigest()


def remembered_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex; a large one is read once a machine, while the other processes wait for it.

    It is known again by its path, size, time of change and first bytes, which in safetensors and GGUF files name the tensors.

    Raises:
        InputError: it cannot be read.
    """
    try:
        path, state = path.resolve(), path.stat()
        if state.st_size < REMEMBERED_BYTES:
            return sha256_of(path)
        with path.open("rb") as file:
            start = hashlib.sha256(file.read(START_BYTES)).hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    folder = downloads_folder() / "hashes"
    known = folder / fingerprint(str(path), state.st_size, state.st_mtime_ns, start)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(known.with_suffix(".lock")):
            if known.is_file() and SHA256.fullmatch(found := known.read_text(encoding="utf-8")):
                return found
            found = sha256_of(path)
            write_text(known, found)
            return found
    except (OSError, InputError):  # a folder that cannot be written, or locked
        return sha256_of(path)


def hash_weights(path: Path) -> str:
    """Return the hash of the files that transformers loads of a model folder's weights, or of a model that is one file.

    A second copy of the weights beside them, such as Mistral's `consolidated.safetensors`, does not count.

    Raises:
        InputError: the folder holds none, or its index cannot be read or names files that are not there.
    """
    if path.is_file():
        return hash_files([path])
    if (path / SINGLE_FILE).is_file():
        return hash_files([path / SINGLE_FILE])
    if (path / INDEX_FILE).is_file():
        return hash_files({path / file for file in files_by_key(path).values()})
    found = [each for pattern in WEIGHT_PATTERNS for each in path.glob(pattern)]
    if not found:
        raise InputError(f"{path} holds no weights ({' or '.join(WEIGHT_PATTERNS)})")
    return hash_files(found)


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the hash of what gives token ids their meaning: the whole vocabulary and the special tokens' ids."""
    content = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "added": sorted((index, str(token)) for index, token in tokenizer.added_tokens_decoder.items()),
        "special": sorted(tokenizer.all_special_ids),
    }
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


def hash_chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the hash of the chat template; a tokenizer without one hashes the empty text."""
    template = tokenizer.chat_template or ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()

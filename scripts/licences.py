"""Under which licence a target stands, as far as it says so itself: a draft made from it is bound by that too.

Read is the model card in the target's folder or, of a Hub id, the one in the Hub's cache, else on the Hub. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import ModelCard, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from yaml import YAMLError

CARD = "README.md"


@dataclass(frozen=True, kw_only=True)
class TargetCard:
    """What a target's own card says; None: nothing.

    Args:
        license: identifier of the Hub's.
        license_name, license_link: of one that has no identifier (`other`).
        language: codes.
    """

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    language: str | list[str] | None = None


def read_target_card(name: str, revision: str | None, *, online: bool) -> TargetCard:
    """Return what the card of a target says.

    Args:
        name: a folder, a file or a Hub id.
        revision: of the Hub id; None: its main branch.
        online: the Hub may be asked; a card that it does not hand out says nothing.
    """
    path = _find(name, revision, online)
    if path is None:
        return TargetCard()
    try:
        data = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, YAMLError):  # somebody else's file: what cannot be read says nothing
        return TargetCard()
    return TargetCard(
        license=_text(data, "license"),
        license_name=_text(data, "license_name"),
        license_link=_text(data, "license_link"),
        language=data.get("language"),
    )


def _find(name: str, revision: str | None, online: bool) -> Path | None:
    folder = Path(name)
    if folder.exists():
        card = (folder if folder.is_dir() else folder.parent) / CARD
        return card if card.is_file() else None
    try:
        cached = try_to_load_from_cache(name, CARD, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        return Path(hf_hub_download(name, CARD, revision=revision)) if online else None
    except (HFValidationError, HfHubHTTPError, HTTPError, OSError):  # no Hub id (embedded:...), no card, no access
        return None


def _text(data: Mapping[str, object], key: str) -> str | None:
    value = data.get(key)
    return value if isinstance(value, str) and value else None

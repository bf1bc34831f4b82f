"""Under which licence the models stand that a draft was made from, as far as they say so themselves: it binds the draft too.

They are the target and, where the draft began as another model (`student.init: model`), that. Read is the card in the folder
or, of a Hub id, the one in the Hub's cache, else on the Hub. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from httpx2 import HTTPError
from huggingface_hub import ModelCard, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from yaml import YAMLError

CARD = "README.md"


@dataclass(frozen=True, kw_only=True)
class OriginCard:
    """What a model's own card says; None: nothing.

    Args:
        license: identifier of the Hub's.
        license_name, license_link: of one that has no identifier (`other`).
        language: codes.
    """

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    language: str | list[str] | None = None


def read_card(name: str, revision: str | None, *, online: bool) -> OriginCard:
    """Return what the card of a model says.

    Args:
        name: a folder, a file or a Hub id.
        revision: of the Hub id; None: its main branch.
        online: the Hub may be asked; a card that it does not hand out says nothing.
    """
    path = _find(name, revision, online)
    if path is None:
        return OriginCard()
    try:
        data = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, YAMLError):  # somebody else's file: what cannot be read says nothing
        return OriginCard()
    return OriginCard(
        license=_text(data, "license"),
        license_name=_text(data, "license_name"),
        license_link=_text(data, "license_link"),
        language=data.get("language"),
    )


def agreed_licence(cards: Iterable[OriginCard]) -> OriginCard | None:
    """Return the first card if all name the same licence; None where one names none, or they differ."""
    first, *others = cards
    known = (first.license, first.license_name)
    return first if first.license and all((each.license, each.license_name) == known for each in others) else None


def initial_model(training: Mapping[str, Any]) -> str | None:
    """Return the model that a draft LM began as, by its training config; None: the target's own blocks, or random weights."""
    student = training.get("student")
    if not isinstance(student, Mapping) or student.get("init") != "model":
        return None
    return str(student["path"])


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

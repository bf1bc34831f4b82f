"""How changes to a recipe are given in another command's config. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Setting = bool | int | float | str | None
Value = Setting | list[int]
NAME = re.compile(r"[A-Za-z0-9_-]+")  # part of a folder's name


def check_names(where: str, names: Iterable[str]) -> None:
    """Raise `ValueError` where a name cannot be part of a folder's."""
    for name in names:
        if not NAME.fullmatch(name):
            raise ValueError(f"{where} has the name {name!r}; expected letters, digits, - and _ only")


def dotted(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested sections under its dotted key.

    Raises:
        ValueError: a value is a list.
    """
    for name, value in section.items():
        key = f"{above}{name}"
        if isinstance(value, dict):
            yield from dotted(value, f"{key}.")
            continue
        if isinstance(value, list):
            raise ValueError(f"{key} must be a single value, not a list; change it in the recipe's own file")
        yield key, value

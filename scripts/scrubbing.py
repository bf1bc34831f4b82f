"""What leaves the house is freed of machine paths and secrets first.

A path under the checkout or the working folder becomes relative to it; of any other absolute path the last part stays. Texts
that look like an access token, and the token that is in use, are masked, as are values under keys that name a secret
(`configs.redaction`). Paths are found by their form, so an answer of a model that holds `/usr/bin/python` would be changed
too: texts of prompts and answers are only freed of secrets (`Scrubber.secrets`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from configs.provenance import ROOT
from configs.redaction import FORMS, MASK, mask_arguments, mask_secrets, redact

PART = r"[^\s/\\'\"`,;:|<>()\[\]{}]+"
POSIX_PATH = re.compile(rf"(?<![\w./~\\-])(?:~[\w-]*|\.\.)?/(?!/)(?:{PART}/)+({PART})?|(?<![\w./~\\-])~[\w-]*/({PART})")
CLIMBING_PATH = re.compile(rf"(?<![\w./])(?:\.\./)+(?:{PART}/)*({PART})?")
WINDOWS_PATH = re.compile(rf"(?<!\w)[A-Za-z]:[\\/](?![\\/])(?:{PART}[\\/]+)*({PART})?")
WHOLE_PATH = re.compile(r"(?:~[\w-]*)?/(?!.*[ =:][/~])[^\n,;]*/[^\n,;]*")
FILE_ADDRESS = re.compile(r"\bfile://(?=/)")


class Scrubber:
    """Frees texts of paths and secrets.

    Args:
        secrets: texts to be masked wherever they stand, besides those that look like tokens.
        homes: folders below which paths stay, relative to them; None: the checkout and the working folder.
    """

    def __init__(self, secrets: Iterable[str | None] = (), homes: Iterable[Path] | None = None) -> None:
        folders = (ROOT, Path.cwd()) if homes is None else homes
        named = {str(each) for folder in folders for each in (folder.absolute(), folder.resolve())} - {"/"}
        self._homes = sorted(named, key=len, reverse=True)
        self._user_home = os.path.expanduser("~")
        self._secrets = [secret for secret in secrets if secret]

    def text(self, text: str) -> str:
        """Return a text without paths and secrets."""
        text = FILE_ADDRESS.sub("", self.secrets(text))
        for home in self._homes:
            text = re.sub(rf"(?<![\w./]){re.escape(home)}(?:(/)|(?![\w.-]))", lambda found: "" if found[1] else ".", text)
        if WHOLE_PATH.fullmatch(text):  # the searches below end a path at a blank
            return Path(text).name or "."
        if self._user_home not in ("", "/", "~"):
            text = text.replace(self._user_home + "/", "/home/")  # one without blanks, for the search below
        for pattern in (WINDOWS_PATH, POSIX_PATH, CLIMBING_PATH):
            text = pattern.sub(lambda found: next(filter(None, found.groups()), "."), text)
        return text

    def secrets(self, text: str) -> str:
        """Return a text with its secrets masked and its paths as they are."""
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return redact(text)

    def finds_token(self, text: str) -> bool:
        """Tell whether an access token stands in a text; narrower than `secrets`, fit for a tokenizer's vocabulary."""
        return FORMS.search(text) is not None or any(secret in text for secret in self._secrets)

    def value(self, value: Any) -> Any:
        """Return a JSON value without paths and secrets, in keys as well; a list `command` also without its secret values."""
        return self._walk(mask_secrets(value), self.text)

    def only_secrets(self, value: Any) -> Any:
        """Return a JSON value without secrets."""
        return self._walk(value, self.secrets)

    def _walk(self, value: Any, change: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list):
            return [self._walk(each, change) for each in value]
        if not isinstance(value, dict):
            return value
        return {
            change(key): self._walk(mask_arguments(inner) if _is_command(key, inner) else inner, change)
            for key, inner in value.items()
        }


def _is_command(key: str, value: Any) -> bool:
    return key == "command" and isinstance(value, list) and all(isinstance(each, str) for each in value)

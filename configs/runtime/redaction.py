"""Keeping secrets, and machine paths, out of everything that is written: records, artifacts, trackers, logs, errors.

A value is masked where its key names a secret (`hf_token`, not `max_new_tokens`), where it has the form of one (a Hub or cloud
token, a login inside a URL, an `Authorization` header), and where it is the value of an environment variable whose name says so
(`HF_TOKEN`, `WANDB_API_KEY`) or that a command took a key from (`hide`). A key of 40 hex digits looks like a commit, so only
its name gives it away. `scrub` also removes machine paths, for what is published.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.runtime.files import CHECKOUT

MASK = "***"
PIECE_BYTES, LONGEST = 2**22, 2**10  # of a file that is searched; characters by which any secret is known
SHORTEST = 6  # characters of a value that is masked wherever it turns up; shorter ones would be parts of words
# `hf_token` is a secret, `max_new_tokens` is not.
WORDS = r"secret|password|passwd|credential|(?:api|access|secret|private|account)[_-]?key|dockerconfigjson"
SECRET_KEY = re.compile(rf"(^|[^a-z])token$|^auths?$|{WORDS}", re.IGNORECASE)
# Below these keys numbers are masked too; below `pad_token` a number is an id.
SURELY_SECRET_KEY = re.compile(WORDS, re.IGNORECASE)
SECRET_INSIDE = re.compile(rf"(^|[^a-z])(token|\w*({WORDS})\w*)[\"']?\s*:", re.IGNORECASE)  # as in hub={token: x}
SECRET_VARIABLE = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY|APIKEY)$")
FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_-]{16,}|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"  # OpenAI and its like, Stripe
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"  # GitHub, GitLab
    r"|npm_[A-Za-z0-9]{36}"
    r"|A[KS]IA[0-9A-Z]{16}|AIza[A-Za-z0-9_-]{30,}|xox[abprs]-[A-Za-z0-9-]{10,}"  # AWS, Google, Slack
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"  # JSON web tokens
    r"|eyJhdXRocyI[A-Za-z0-9+/]{8,}=*)"  # {"auths" in base64: docker's logins in a Kubernetes secret
    r"|-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|.*)",
    re.ASCII | re.DOTALL,
)
DOCKER_LOGIN = re.compile(r"\"auth\"\s*:\s*\"[A-Za-z0-9+/]{8,}=*\"")  # a user's name and password in base64
LOGIN = re.compile(r"(?<=://)[^/\s\"']+(?=@)")  # user:password of a URL, up to the last @: a password may hold one
HEADER = re.compile(r"(authorization[\"']?\s*[:=]\s*[\"']?)(?:(?:bearer|basic|token)\s+)?[^\s\"',}]+", re.IGNORECASE)
BEARER = re.compile(r"(\bbearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
# hub_token=x, "password": "x y", ?sig=x, X-Api-Key: x. A text like `hub_token: expected text` speaks of a setting, so without
# quotes or "=" a colon makes a secret of what follows the other words only.
ASSIGNED = re.compile(
    r"((?:(?:(?<![a-z])(?:token|auth)|signature|(?<=[?&])sig|(?<=[?&])key)(?:[\"'][ \t]*:[ \t]*(?=[\"'])|=)"
    rf"|(?:{WORDS})s?(?:[\"']?[ \t]*[:=][ \t]*)(?!//|(?:null|none|true|false)\b)))"
    r"(?:(?P<quote>[\"'])(?:\\.|(?!(?P=quote)).)*|[^\s\"',;&{}\[\]]+)",
    re.IGNORECASE,
)
# What is masked, in this order: kind, form, and what stands in its place.
MASKED: tuple[tuple[str, re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    ("token", FORMS, MASK),
    ("login", LOGIN, MASK),
    ("header", HEADER, rf"\g<1>{MASK}"),
    ("header", BEARER, rf"\g<1>{MASK}"),
    ("assigned", ASSIGNED, lambda found: found[1] + (found["quote"] or "") + MASK),
)
# Bounded, so that a long text without an @ costs no more than its length. It also takes git@host and the like.
EMAIL = re.compile(r"[\w.%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}")
PRIVATE_KEY = re.compile(r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY")
# Paths are known by their form.
PART = r"[^\s/\\'\"`,;:|<>()\[\]{}]+"
POSIX_PATH = re.compile(rf"(?<![\w./~\\-])(?:~[\w-]*|\.\.)?/(?!/)(?:{PART}/)+({PART})?|(?<![\w./~\\-])~[\w-]*/({PART})")
CLIMBING_PATH = re.compile(rf"(?<![\w./])(?:\.\./)+(?:{PART}/)*({PART})?")
WHOLE_PATH = re.compile(r"(?:~[\w-]*)?/(?!.*[ =:][/~])[^\n,;]*/[^\n,;]*")
FILE_ADDRESS = re.compile(r"\bfile://(?=/)")

_hidden: set[str] = set()


def hide(secret: str) -> None:
    """Mask this value from now on wherever it turns up."""
    _hidden.add(secret)


def redact(text: str) -> str:
    """Return a text without what has the form of a secret, or is one that this process knows."""
    text = _without_known(text)
    for _, pattern, masked in MASKED:
        text = pattern.sub(masked, text)
    return text


def mask_counting(text: str, found: Counter[str]) -> str:
    """Return a text without secrets and e-mail addresses, and add to `found` how many of each kind it had (`MASKED`)."""
    kept = _without_known(text)
    found["known"] += kept != text
    for kind, pattern, masked in (*MASKED, ("email", EMAIL, MASK)):
        kept, count = pattern.subn(masked, kept)
        found[kind] += count
    return kept


def _without_known(text: str) -> str:
    known = {value for name, value in os.environ.items() if SECRET_VARIABLE.search(name)}
    paths = {value for value in known if value.startswith("/") and os.path.exists(value)}  # such as a key file's
    for secret in sorted((known - paths) | _hidden, key=len, reverse=True):
        if len(secret) >= SHORTEST:
            text = text.replace(secret, MASK)
    return text


def mask_arguments(arguments: list[str]) -> list[str]:
    """Return a command line without secrets."""
    masked, previous = [], ""
    for argument in arguments:
        option = "--set=" if argument.startswith("--set=") else ""
        key, equals, value = argument.removeprefix(option).partition("=")
        if previous.startswith("--") and "=" not in previous and SECRET_KEY.search(previous):  # --api-key x
            masked.append(MASK)
        elif equals and (any(SECRET_KEY.search(part) for part in key.split(".")) or SECRET_INSIDE.search(value)):
            masked.append(f"{option}{key}={MASK}")
        else:
            masked.append(redact(argument))
        previous = argument
    return masked


def mask_secrets(value: Any) -> Any:
    """Return a JSON value without secrets.

    What stands under a secret key is masked as a whole, under a key of tokens its texts alone; so are the secret values of a
    list `command`. Other texts are redacted; the rest stays.
    """
    if isinstance(value, dict):
        return {key: _mask_field(key, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [mask_secrets(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def _mask_field(key: str, value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if SURELY_SECRET_KEY.search(key) or (SECRET_KEY.search(key) and isinstance(value, str)):
        return MASK
    if SECRET_KEY.search(key) and isinstance(value, list):
        return [_mask_field(key, each) for each in value]
    if key == "command" and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return mask_arguments(value)
    return mask_secrets(value)


def scrub(text: str) -> str:
    """Return a text without secrets and machine paths.

    A path below the checkout or the working folder becomes relative to it; of any other absolute path the last part stays.
    Paths are found by their form, so that an answer of a model that holds `/usr/bin/python` would change: `redact` keeps it.
    """
    text = FILE_ADDRESS.sub("", redact(text))
    homes = {str(each) for folder in (CHECKOUT, Path.cwd()) for each in (folder.absolute(), folder.resolve())} - {"/"}
    for home in sorted(homes, key=len, reverse=True):
        text = re.sub(rf"(?<![\w./]){re.escape(home)}(?:(/)|(?![\w.-]))", lambda found: "" if found[1] else ".", text)
    if WHOLE_PATH.fullmatch(text):  # the searches below end a path at a blank
        return Path(text).name or "."
    user_home = os.path.expanduser("~")
    if user_home not in ("", "/", "~"):
        text = text.replace(user_home + "/", "/home/")  # one without blanks, for the search below
    for pattern in (POSIX_PATH, CLIMBING_PATH):
        text = pattern.sub(lambda found: next(filter(None, found.groups()), "."), text)
    return text


def scrub_value(value: Any) -> Any:
    """Return a JSON value without secrets and machine paths, in keys as well."""

    def scrubbed(value: Any) -> Any:
        if isinstance(value, str):
            return scrub(value)
        if isinstance(value, list):
            return [scrubbed(each) for each in value]
        return {scrub(key): scrubbed(inner) for key, inner in value.items()} if isinstance(value, dict) else value

    return scrubbed(mask_secrets(value))


def holds_token(path: Path) -> bool:
    """Return whether a file holds an access token or a private key; narrower than `redact`, fit for a vocabulary."""
    with path.open("rb") as file:
        before = ""
        while piece := file.read(PIECE_BYTES):
            text = before + piece.decode("latin-1").replace("\0", "")  # a character a byte, also of UTF-16
            known = any(secret in text for secret in _hidden if len(secret) >= SHORTEST)
            if known or FORMS.search(text) or DOCKER_LOGIN.search(text):
                return True
            before = text[-LONGEST:]
    return False

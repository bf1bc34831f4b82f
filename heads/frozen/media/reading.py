"""One image or sound from a path, a data URL or a URL, within limits of size and time.

Whoever wrote the rows may be nobody we know: what is opened is bounded before it is decoded, and what cannot be read is one
sentence.
"""

from __future__ import annotations

import base64
import binascii
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

import httpx2

from configs.runtime.errors import InputError, first_line
from configs.schema.target import AudioConfig, ImagesConfig, MediaConfig
from heads.inference.media_inputs import SOUND

Read = TypeVar("Read")
URLS = ("http://", "https://")
SHOWN = 60  # characters of a reference in messages


def opened(reference: str, config: MediaConfig, decode: Callable[[bytes], Read]) -> Read:
    """Return what `decode` makes of the bytes that a reference stands for.

    Raises:
        InputError: they cannot be had, or exceed a limit of the config.
    """
    return _within(config, reference, lambda: decode(_bytes_of(reference.removeprefix(SOUND), config)))


def kind_of(reference: str) -> type[ImagesConfig] | type[AudioConfig]:
    """Return the settings by which a reference is read."""
    return AudioConfig if reference.startswith(SOUND) else ImagesConfig


def shown(reference: str) -> str:
    """Return a reference as messages name it, in one line: the beginning of a long one, what cannot be printed escaped."""
    reference = reference.removeprefix(SOUND)
    reference = reference if len(reference) <= SHOWN else f"{reference[: SHOWN - 3]}..."
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in reference)


def _bytes_of(reference: str, config: MediaConfig) -> bytes:
    if reference.startswith("data:"):
        return _from_data_url(reference, config)
    if reference.startswith(URLS):
        return _fetched(reference, config)
    folder = Path(config.folder or ".")
    try:
        path = (folder / reference.removeprefix("file://")).resolve()
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise refusal(reference, config, f"is no path: {first_line(error)}") from error
    if config.folder is not None and not path.is_relative_to(folder.resolve()):
        raise refusal(reference, config, f"lies outside {config.key}.folder, {config.folder}")
    try:
        if not path.is_file():
            raise refusal(reference, config, f"is no file here ({path})" if path.exists() else f"was not found ({path})")
        with path.open("rb") as file:
            content = file.read(config.max_bytes + 1)
    except OSError as error:
        raise refusal(reference, config, f"cannot be read: {error.strerror or error}") from error
    return _limited(content, reference, config)


def _from_data_url(reference: str, config: MediaConfig) -> bytes:
    head, comma, body = reference.partition(",")
    if not comma:
        raise refusal(reference, config, "is no data URL: it has no comma before its content")
    if len(body) > 2 * config.max_bytes:  # base64 takes 4 characters for 3 bytes
        raise _too_large(reference, config)
    try:
        content = base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise refusal(reference, config, f"is no data URL: {first_line(error)}") from error
    return _limited(content, reference, config)


def _fetched(reference: str, config: MediaConfig) -> bytes:
    if not config.allow_urls:
        what = f"is a URL, and nothing is fetched: set {config.key}.allow_urls to true, or give the file"
        raise refusal(reference, config, what)
    content, deadline = b"", time.monotonic() + config.timeout_seconds
    plain = {"Accept-Encoding": "identity"}  # some bytes, unpacked, could be more than memory holds
    try:
        with httpx2.stream("GET", reference, headers=plain, timeout=config.timeout_seconds, follow_redirects=False) as response:
            if response.status_code != httpx2.codes.OK:
                raise refusal(reference, config, f"was answered with status {response.status_code}")
            for part in response.iter_raw():
                content += part
                if len(content) > config.max_bytes or time.monotonic() > deadline:
                    break
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:  # the last for a name that is no host's
        raise refusal(reference, config, f"could not be fetched: {first_line(error)}") from error
    return _limited(content, reference, config)


def _within(config: MediaConfig, reference: str, read: Callable[[], Read]) -> Read:
    """Return what `read` returns; it runs in a thread, left behind where it takes longer: a hanging mount has no interrupt."""
    done: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        try:
            done.put((read(), None))
        except Exception as error:  # raised again in the caller's thread
            done.put((None, error))

    threading.Thread(target=work, daemon=True, name=config.what).start()
    try:
        result, error = done.get(timeout=config.timeout_seconds)
    except queue.Empty:
        raise refusal(
            reference, config, f"was not read within {config.timeout_seconds:g} s ({config.key}.timeout_seconds)"
        ) from None
    if error is not None:
        raise error
    return result


def _limited(content: bytes, reference: str, config: MediaConfig) -> bytes:
    if len(content) > config.max_bytes:
        raise _too_large(reference, config)
    return content


def _too_large(reference: str, config: MediaConfig) -> InputError:
    return refusal(reference, config, f"has more bytes than {config.key}.max_bytes, {config.max_bytes}")


def refusal(reference: str, config: MediaConfig, what: str) -> InputError:
    """Return the error that an image or sound `what`, as in "is no file here"."""
    return InputError(f"{config.what} {shown(reference)} {what}")

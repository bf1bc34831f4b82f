"""One image from a path, a data URL or a URL, within limits of size and time.

Whoever wrote the rows may be nobody we know: what is opened is bounded before it is decoded, only formats of pictures are
tried, and what cannot be read is one sentence.
"""

from __future__ import annotations

import base64
import binascii
import io
import queue
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

import httpx2

from configs.runtime.errors import InputError, first_line
from configs.schema.target import ImagesConfig

Read = TypeVar("Read")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
URLS = ("http://", "https://")
SHOWN = 60  # characters of a reference in messages


def read_image(reference: str, config: ImagesConfig) -> Any:
    """Return an image, a `PIL.Image.Image` in RGB, upright; of several frames the first.

    Raises:
        InputError: it cannot be had, is none of `FORMATS`, is damaged, or exceeds a limit of the config.
    """
    return _within(config.timeout_seconds, reference, lambda: _decoded(_bytes_of(reference, config), reference, config))


def shown(reference: str) -> str:
    """Return an image's reference as messages name it."""
    return reference if len(reference) <= SHOWN else f"{reference[: SHOWN - 3]}..."


def _bytes_of(reference: str, config: ImagesConfig) -> bytes:
    if reference.startswith("data:"):
        return _from_data_url(reference, config)
    if reference.startswith(URLS):
        return _fetched(reference, config)
    folder = Path(config.folder or ".")
    path = (folder / reference.removeprefix("file://")).resolve()
    if config.folder is not None and not path.is_relative_to(folder.resolve()):
        raise _refusal(reference, f"lies outside target.images.folder, {config.folder}")
    try:
        if not path.is_file():
            raise _refusal(reference, f"is no file here ({path})" if path.exists() else f"was not found ({path})")
        with path.open("rb") as file:
            content = file.read(config.max_bytes + 1)
    except OSError as error:
        raise _refusal(reference, f"cannot be read: {error.strerror or error}") from error
    return _limited(content, reference, config)


def _from_data_url(reference: str, config: ImagesConfig) -> bytes:
    head, comma, body = reference.partition(",")
    if not comma:
        raise _refusal(reference, "is no data URL: it has no comma before its content")
    if len(body) > 2 * config.max_bytes:  # base64 takes 4 characters for 3 bytes
        raise _too_large(reference, config)
    try:
        content = base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise _refusal(reference, f"is no data URL: {first_line(error)}") from error
    return _limited(content, reference, config)


def _fetched(reference: str, config: ImagesConfig) -> bytes:
    if not config.allow_urls:
        raise _refusal(reference, "is a URL, and nothing is fetched: set target.images.allow_urls to true, or give the file")
    content, deadline = b"", time.monotonic() + config.timeout_seconds
    try:
        with httpx2.stream("GET", reference, timeout=config.timeout_seconds, follow_redirects=False) as response:
            if response.status_code != httpx2.codes.OK:
                raise _refusal(reference, f"was answered with status {response.status_code}")
            for part in response.iter_bytes():
                content += part
                if len(content) > config.max_bytes or time.monotonic() > deadline:
                    break
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise _refusal(reference, f"could not be fetched: {first_line(error)}") from error
    return _limited(content, reference, config)


def _decoded(content: bytes, reference: str, config: ImagesConfig) -> Any:
    from PIL import Image, ImageOps  # here: text needs none

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is ours
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        width, height = image.size
        if width * height > config.max_pixels:
            raise _refusal(reference, f"has {width} x {height} pixels, more than target.images.max_pixels, {config.max_pixels}")
        return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as error:
        raise _refusal(reference, f"has more pixels than Pillow decodes: {first_line(error)}") from error
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError, OverflowError) as error:
        raise _refusal(reference, f"is no whole image of {', '.join(FORMATS)}: {first_line(error)}") from error


def _within(seconds: float, reference: str, read: Callable[[], Read]) -> Read:
    """Return what `read` returns; it runs in a thread, left behind where it takes longer: a hanging mount has no interrupt."""
    done: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        try:
            done.put((read(), None))
        except Exception as error:  # raised again in the caller's thread
            done.put((None, error))

    threading.Thread(target=work, daemon=True, name="image").start()
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise _refusal(reference, f"was not read within {seconds:g} s (target.images.timeout_seconds)") from None
    if error is not None:
        raise error
    return result


def _limited(content: bytes, reference: str, config: ImagesConfig) -> bytes:
    if len(content) > config.max_bytes:
        raise _too_large(reference, config)
    return content


def _too_large(reference: str, config: ImagesConfig) -> InputError:
    return _refusal(reference, f"has more bytes than target.images.max_bytes, {config.max_bytes}")


def _refusal(reference: str, what: str) -> InputError:
    return InputError(f"image {shown(reference)} {what}")

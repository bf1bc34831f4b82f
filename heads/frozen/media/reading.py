"""One image or sound of a prompt, from a path, a data URL or a URL, within limits of size and time.

The rows of data are not trusted: the size of a file is bounded before it is decoded. Of images only `FORMATS` are tried, whose
size is known before they are decoded; sounds are uncompressed WAV files of 8 to 32 bits, which the standard library reads.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import struct
import time
import warnings
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

import httpx2
import numpy as np

from configs.runtime.errors import InputError, first_line
from configs.schema.target import AudioConfig, ImagesConfig, MediaConfig
from heads.inference.media_inputs import SOUND

Read = TypeVar("Read")
URLS = ("http://", "https://")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
RATES = (4000, 192_000)  # samples a second that are accepted
SHORTEST = 0.1  # seconds: of less, audio parts have no whole state
SHOWN = 60  # characters of a reference in messages


def read_image(reference: str, config: ImagesConfig) -> Any:
    """Return an image, a `PIL.Image.Image` in RGB, upright; of several frames the first.

    Raises:
        InputError: it cannot be had, is none of `FORMATS`, is damaged, or exceeds a limit of the config.
    """
    return _opened(reference, config, lambda content: _decoded(content, reference, config))


def read_sound(reference: str, config: AudioConfig, rate: int) -> np.ndarray:
    """Return the samples of a sound, float32 from -1 to 1, its channels averaged, at `rate` a second.

    Raises:
        InputError: it cannot be had, is no WAV file, is damaged, too short, or exceeds a limit of the config.
    """

    def decoded(content: bytes) -> np.ndarray:
        longer = wav_samples(content, f"{config.what} {shown(reference)}", rate, config.max_seconds + 1 / rate)
        if len(longer) > config.max_seconds * rate:
            raise _refusal(reference, config, f"is longer than {config.max_seconds:g} s (target.audio.max_seconds)")
        if len(longer) < SHORTEST * rate:
            raise _refusal(reference, config, f"is shorter than {SHORTEST:g} s")
        return longer.astype(np.float32)

    return _opened(reference, config, decoded)


def wav_samples(content: bytes, named: str, rate: int, seconds: float) -> np.ndarray:
    """Return the first `seconds` of a WAV file's samples, from -1 to 1, its channels averaged, at `rate` a second.

    Args:
        content: of the file.
        named: what messages call it.

    Raises:
        InputError: it is cut off, or no such file.
    """
    from scipy.signal import resample_poly  # here: text needs none

    try:
        with wave.open(io.BytesIO(content)) as file:
            own_rate, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            frames = min(file.getnframes(), math.ceil(seconds * own_rate))
            held = file.readframes(frames)
    except (wave.Error, EOFError, OSError, RuntimeError) as error:
        raise InputError(f"{named} is no uncompressed WAV file: {error or 'it ends too early'}") from error
    if not RATES[0] <= own_rate <= RATES[1] or width > 4:
        raise InputError(
            f"{named} has {own_rate} samples a second of {8 * width} bits; {RATES[0]} to {RATES[1]} of 8 to 32 are taken"
        )
    if not held or len(held) != frames * width * channels:
        raise InputError(f"{named} is cut off: {len(held)} bytes of sound where it names {frames * width * channels}")
    bytes_SW: np.ndarray = np.frombuffer(held, dtype=np.uint8).reshape(-1, width)
    if width == 1:  # the only width without a sign
        bytes_SW = bytes_SW ^ 0x80
    samples = np.pad(bytes_SW, ((0, 0), (4 - width, 0))).view("<i4").reshape(-1, channels).mean(1) / 2**31
    common = math.gcd(own_rate, rate)
    resampled: np.ndarray = resample_poly(samples, rate // common, own_rate // common)
    return resampled


def _opened(reference: str, config: MediaConfig, decode: Callable[[bytes], Read]) -> Read:
    """Return what `decode` makes of the bytes that a reference stands for.

    Raises:
        InputError: they cannot be had, or exceed a limit of the config.
    """
    return decode(_bytes_of(reference.removeprefix(SOUND), config))


def kind_of(reference: str) -> type[ImagesConfig] | type[AudioConfig]:
    """Return the settings by which a reference is read."""
    return AudioConfig if reference.startswith(SOUND) else ImagesConfig


def shown(reference: str) -> str:
    """Return a reference as messages name it, in one line: the beginning of a long one, what cannot be printed escaped."""
    reference = reference.removeprefix(SOUND)
    reference = reference if len(reference) <= SHOWN else f"{reference[: SHOWN - 3]}..."
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in reference)


def _decoded(content: bytes, reference: str, config: ImagesConfig) -> Any:
    from PIL import Image, ImageOps  # here: text needs none

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is ours
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        width, height = image.size
        if width * height > config.max_pixels:
            found = f"has {width} x {height} pixels, more than target.images.max_pixels, {config.max_pixels}"
            raise _refusal(reference, config, found)
        return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as error:
        raise _refusal(reference, config, f"has more pixels than Pillow decodes: {first_line(error)}") from error
    except InputError:
        raise
    except (OSError, ValueError, TypeError, SyntaxError, EOFError, MemoryError, OverflowError, struct.error) as error:
        raise _refusal(reference, config, f"is no whole image of {', '.join(FORMATS)}: {first_line(error)}") from error


def _bytes_of(reference: str, config: MediaConfig) -> bytes:
    if reference.startswith("data:"):
        return _from_data_url(reference, config)
    if reference.startswith(URLS):
        return _fetched(reference, config)
    folder = Path(config.folder or ".")
    try:
        path = (folder / reference.removeprefix("file://")).resolve()
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise _refusal(reference, config, f"is no path: {first_line(error)}") from error
    if config.folder is not None and not path.is_relative_to(folder.resolve()):
        raise _refusal(reference, config, f"lies outside {config.key}.folder, {config.folder}")
    try:
        if not path.is_file():
            raise _refusal(reference, config, f"is no file here ({path})" if path.exists() else f"was not found ({path})")
        with path.open("rb") as file:
            content = file.read(config.max_bytes + 1)
    except OSError as error:
        raise _refusal(reference, config, f"cannot be read: {error.strerror or error}") from error
    return _limited(content, reference, config)


def _from_data_url(reference: str, config: MediaConfig) -> bytes:
    head, comma, body = reference.partition(",")
    if not comma:
        raise _refusal(reference, config, "is no data URL: it has no comma before its content")
    if len(body) > 2 * config.max_bytes:  # base64 takes 4 characters for 3 bytes
        raise _too_large(reference, config)
    try:
        content = base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise _refusal(reference, config, f"is no data URL: {first_line(error)}") from error
    return _limited(content, reference, config)


def _fetched(reference: str, config: MediaConfig) -> bytes:
    if not config.allow_urls:
        what = f"is a URL, and nothing is fetched: set {config.key}.allow_urls to true, or give the file"
        raise _refusal(reference, config, what)
    content, deadline = b"", time.monotonic() + config.timeout_seconds
    plain = {"Accept-Encoding": "identity"}  # some bytes, unpacked, could be more than memory holds
    try:
        with httpx2.stream("GET", reference, headers=plain, timeout=config.timeout_seconds, follow_redirects=False) as response:
            if response.status_code != httpx2.codes.OK:
                raise _refusal(reference, config, f"was answered with status {response.status_code}")
            for part in response.iter_raw():
                content += part
                if len(content) > config.max_bytes:
                    break
                if time.monotonic() > deadline:
                    limit = f"{config.key}.timeout_seconds, {config.timeout_seconds:g}"
                    raise _refusal(reference, config, f"takes longer to fetch than {limit}")
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:  # the last for a name that is no host's
        raise _refusal(reference, config, f"could not be fetched: {first_line(error)}") from error
    return _limited(content, reference, config)


def _limited(content: bytes, reference: str, config: MediaConfig) -> bytes:
    if len(content) > config.max_bytes:
        raise _too_large(reference, config)
    return content


def _too_large(reference: str, config: MediaConfig) -> InputError:
    return _refusal(reference, config, f"has more bytes than {config.key}.max_bytes, {config.max_bytes}")


def _refusal(reference: str, config: MediaConfig, what: str) -> InputError:
    """Return the error that an image or sound `what`, as in "is no file here"."""
    return InputError(f"{config.what} {shown(reference)} {what}")

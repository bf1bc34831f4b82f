"""One sound of a prompt, and WAV files in general, which the standard library reads: uncompressed ones of 8 to 32 bits."""

from __future__ import annotations

import io
import math
import wave

import numpy as np

from configs.runtime.errors import InputError
from configs.schema.target import AudioConfig
from heads.frozen.media.reading import opened, refusal, shown

RATES = (4000, 192_000)  # samples a second that are taken
SHORTEST = 0.1  # seconds: of less, audio parts have no whole state


def read_sound(reference: str, config: AudioConfig, rate: int) -> np.ndarray:
    """Return the samples of a sound, float32 from -1 to 1, its channels averaged, at `rate` a second.

    Raises:
        InputError: it cannot be had, is no WAV file, is damaged, too short, or exceeds a limit of the config.
    """

    def decoded(content: bytes) -> np.ndarray:
        longer = wav_samples(content, f"{config.what} {shown(reference)}", rate, config.max_seconds + 1 / rate)
        if len(longer) > config.max_seconds * rate:
            raise refusal(reference, config, f"is longer than {config.max_seconds:g} s (target.audio.max_seconds)")
        if len(longer) < SHORTEST * rate:
            raise refusal(reference, config, f"is shorter than {SHORTEST:g} s")
        return longer.astype(np.float32)

    return opened(reference, config, decoded)


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

"""Sounds that anybody may have written: what cannot be read is one sentence, and limits hold before decoding."""

import base64
import struct
from pathlib import Path

import numpy as np
import pytest

from configs.runtime.errors import InputError
from configs.schema.target import AudioConfig
from heads.frozen.media import read_sound
from heads.frozen.tokenizer import SOUND
from scripts.lab.models_check.media_models import sound

RATE = 16000
SECOND = sound(0, 1.0)  # 8,000 samples of 16 bits


def test_a_path_and_a_data_url_are_resampled(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(SECOND)
    url = "data:audio/wav;base64," + base64.b64encode(SECOND).decode()
    given = np.frombuffer(SECOND[44:], "<i2") / 2**15
    for reference in ("a.wav", url):
        samples = read_sound(SOUND + reference, AudioConfig(folder=str(tmp_path), max_seconds=1.0), RATE)
        assert (samples.shape, samples.dtype) == ((RATE,), np.float32)
        assert np.abs(samples[::2] - given)[100:-100].max() < 0.01


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (SECOND[:5000], "is cut off: 4956 bytes of sound where it names 16000"),
        (SECOND[:40] + struct.pack("<I", 2**31) + SECOND[44:], "is cut off"),  # says that it is of hours
        (SECOND[:30], "is no uncompressed WAV file"),
        (b"ID3\x04 no sound", "is no uncompressed WAV file"),
        (b"", "is no uncompressed WAV file"),
        (SECOND[:20] + b"\x55\x00" + SECOND[22:], "is no uncompressed WAV file"),  # MP3 within
        (SECOND[:24] + b"\xff" * 4 + SECOND[28:], "samples a second of 16 bits; 4000 to 192000"),
        (sound(0, 1.1), r"is longer than 1 s \(target.audio.max_seconds\)"),
        (sound(0, 0.05), "is shorter than 0.1 s"),
        (SECOND * 2, "more bytes than target.audio.max_bytes, 20000"),
    ],
    ids=["truncated", "huge", "header", "mp3", "empty", "codec", "rate", "long", "short", "bytes"],
)
def test_hostile_files_are_one_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(InputError, match=says) as refusal:
        read_sound(SOUND + "a.wav", AudioConfig(folder=str(tmp_path), max_bytes=20_000, max_seconds=1.0), RATE)
    assert str(refusal.value).startswith("sound a.wav ")
    assert "\n" not in str(refusal.value)

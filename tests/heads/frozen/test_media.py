"""Images and sounds that anybody may have written: what cannot be read is one sentence, and limits hold before decoding."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest

from configs.runtime.errors import InputError
from configs.schema.target import AudioConfig, ImagesConfig
from heads.frozen.media import read_image, read_sound
from heads.frozen.tokenizer import SOUND
from scripts.lab.models_check.media_models import sound

Image = pytest.importorskip("PIL.Image")
RATE = 16000
SECOND = sound(0, 1.0)  # 8,000 samples of 16 bits


def png(width=4, height=3):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 10)).save(file, "PNG")
    return file.getvalue()


def bomb(side):
    """Return a PNG of some bytes that says it is a square of so many pixels a side."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


def turned_by_damaged_exif():
    """Return a JPEG to be turned upright whose EXIF data has a text where the width would be."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112], exif[0x010E] = 6, "text"
    Image.new("RGB", (4, 3)).save(file, "JPEG", exif=exif)
    return file.getvalue().replace(b"\x01\x0e\x00\x02", b"\x01\x00\x00\x02")


def read(reference, folder):
    if reference.startswith(SOUND):
        return read_sound(reference, AudioConfig(folder=str(folder), max_bytes=20_000, max_seconds=1.0), RATE)
    return read_image(reference, ImagesConfig(folder=str(folder), max_bytes=1000))


def test_an_image_is_read_from_a_path_and_a_data_url(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    for reference in ("a.png", "data:image/png;base64," + base64.b64encode(png()).decode()):
        image = read(reference, tmp_path)
        assert (image.size, image.mode, image.getpixel((0, 0))) == ((4, 3), "RGB", (200, 10, 10))


def test_a_sound_is_resampled(tmp_path):
    (tmp_path / "a.wav").write_bytes(SECOND)
    samples = read(f"{SOUND}a.wav", tmp_path)
    assert (samples.shape, samples.dtype) == ((RATE,), np.float32)
    assert np.abs(samples[::2] - np.frombuffer(SECOND[44:], "<i2") / 2**15)[100:-100].max() < 0.01


@pytest.mark.parametrize(
    ("named", "content", "says"),
    [
        ("image", bomb(20_000), "is no whole image of .* exceeds limit"),
        ("image", bomb(8_000), "has 8000 x 8000 pixels, more than target.images.max_pixels, 50000000"),
        ("image", png(300, 300)[:400], "is no whole image of"),
        ("image", b"", "is no whole image of"),
        ("image", turned_by_damaged_exif(), "is no whole image of .* required argument is not an integer"),
        ("image", b"II*\0" + png(), "is no whole image of"),  # TIFF, which is not tried
        ("image", b"x" * 1001, "more bytes than target.images.max_bytes, 1000"),
        ("sound", SECOND[:5000], "is cut off: 4956 bytes of sound where it names 16000"),
        ("sound", SECOND[:40] + struct.pack("<I", 2**31) + SECOND[44:], "is cut off"),  # says that it is of hours
        ("sound", SECOND[:30], "is no uncompressed WAV file"),
        ("sound", SECOND[:20] + b"\x55\x00" + SECOND[22:], "is no uncompressed WAV file"),  # MP3 within
        ("sound", SECOND[:24] + b"\xff" * 4 + SECOND[28:], "samples a second of 16 bits; 4000 to 192000"),
        ("sound", sound(0, 1.1), r"is longer than 1 s \(target.audio.max_seconds\)"),
        ("sound", sound(0, 0.05), "is shorter than 0.1 s"),
    ],
)
def test_hostile_files_are_one_sentence(tmp_path, named, content, says):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=says) as refusal:
        read(f"{SOUND}a" if named == "sound" else "a", tmp_path)
    assert str(refusal.value).startswith(f"{named} a ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("https://example.org/a.png", "is a URL, and nothing is fetched: give the file"),
        ("../a.png", "lies outside target.images.folder"),
        ("missing.png", "was not found"),
        (".", "is no file here"),
        ("a\0.png", r"image a\\x00.png cannot be read"),
        ("\ud800\n.png", r"image \\ud800\\n.png cannot be read"),
        ("data:image/png;base64,@@", "is no data URL"),
        ("iVBORw0KGgo" * 1000, "File name too long$"),
    ],
)
def test_references_that_lead_nowhere_are_one_sentence(tmp_path, reference, says):
    with pytest.raises(InputError, match=says) as refusal:
        read(reference, tmp_path)
    assert len(str(refusal.value)) < 400
    assert str(refusal.value).isprintable()

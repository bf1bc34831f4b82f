"""Images and sounds that anybody may have written: what cannot be read is one sentence, and limits hold before decoding."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from scipy.io import wavfile

from configs.runtime.errors import InputError
from configs.schema.target import AudioConfig, ImagesConfig
from heads.frozen.media import read_image, read_sound
from heads.frozen.tokenizer import SOUND
from tests.support.media_models import sound

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


def read(reference, folder, max_bytes=20_000):
    if reference.startswith(SOUND):
        return read_sound(reference, AudioConfig(folder=str(folder), max_bytes=max_bytes, max_seconds=1.0), RATE)
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
    ("named", "content"),
    [
        ("image", bomb(20_000)),
        ("image", bomb(8_000)),  # more than max_pixels
        ("image", png(300, 300)[:400]),
        ("image", b""),
        ("image", turned_by_damaged_exif()),
        ("image", b"II*\0" + png()),  # TIFF, which is not tried
        ("image", b"x" * 1001),  # more than max_bytes
        ("sound", SECOND[:5000]),
        ("sound", SECOND[:30]),
        ("sound", SECOND[:20] + b"\x55\x00" + SECOND[22:]),  # MP3 within
        ("sound", SECOND[:24] + b"\xff" * 4 + SECOND[28:]),  # the rate
        ("sound", sound(0, 1.1)),  # more than max_seconds
        ("sound", sound(0, 0.05)),
    ],
)
def test_hostile_files_are_one_sentence(tmp_path, named, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=f"^{named} a ") as refusal:
        read(f"{SOUND}a" if named == "sound" else "a", tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("width", [np.uint8, np.int16, np.int32, np.float32])
def test_every_width_of_samples_means_the_same(tmp_path, width):
    wave = np.round(np.sin(np.arange(RATE) / 20) * 100) / 128
    scale = {np.uint8: 2**7, np.int16: 2**15, np.int32: 2**31, np.float32: 1}[width]
    wavfile.write(tmp_path / "a.wav", RATE, (wave * scale + (128 if width is np.uint8 else 0)).astype(width))
    np.testing.assert_allclose(read(f"{SOUND}a.wav", tmp_path, max_bytes=10**6), wave, atol=1e-6)


@pytest.mark.parametrize(
    "reference",
    [
        "https://example.org/a.png",
        "../a.png",
        "missing.png",
        ".",
        "a\0.png",
        "\ud800\n.png",
        "data:image/png;base64,@@",
        "iVBORw0KGgo" * 1000,
    ],
)
def test_references_that_lead_nowhere_are_one_sentence(tmp_path, reference):
    with pytest.raises(InputError) as refusal:
        read(reference, tmp_path)
    assert len(str(refusal.value)) < 400
    assert str(refusal.value).isprintable()

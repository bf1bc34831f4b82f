"""Images that anybody may have written: what cannot be read is one sentence, and limits hold before decoding."""

import base64
import io
import struct
import zlib
from pathlib import Path

import pytest

from configs.runtime.errors import InputError
from configs.schema.target import ImagesConfig
from heads.frozen.media import read_image

Image = pytest.importorskip("PIL.Image")


def png(width: int = 4, height: int = 3) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 10)).save(file, "PNG")
    return file.getvalue()


def bomb(side: int) -> bytes:
    """Return a PNG of some bytes that says it is a square of so many pixels a side."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


def turned_by_damaged_exif() -> bytes:
    """Return a JPEG to be turned upright whose EXIF data has a text where the width would be."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112], exif[0x010E] = 6, "text"
    Image.new("RGB", (4, 3)).save(file, "JPEG", exif=exif)
    return file.getvalue().replace(b"\x01\x0e\x00\x02", b"\x01\x00\x00\x02")


def test_a_path_and_a_data_url_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    for reference in ("a.png", url):
        image = read_image(reference, ImagesConfig(folder=str(tmp_path)))
        assert (image.size, image.mode, image.getpixel((0, 0))) == ((4, 3), "RGB", (200, 10, 10))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (bomb(20_000), "is no whole image of .* exceeds limit"),
        (bomb(8_000), "has 8000 x 8000 pixels, more than target.images.max_pixels, 50000000"),
        (png(300, 300)[:400], "is no whole image of"),
        (b"%PDF-1.7 no picture", "is no whole image of"),
        (b"", "is no whole image of"),
        (turned_by_damaged_exif(), "is no whole image of .* required argument is not an integer"),
        (b"II*\0" + png(), "is no whole image of"),  # TIFF, which is not tried
        (b"x" * 1001, "more bytes than target.images.max_bytes, 1000"),
    ],
    ids=["bomb", "large", "truncated", "pdf", "empty", "exif", "tiff", "bytes"],
)
def test_hostile_files_are_one_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(InputError, match=says) as refusal:
        read_image("a.png", ImagesConfig(folder=str(tmp_path), max_bytes=1000))
    assert str(refusal.value).startswith("image a.png ")
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
        ("data:image/png;base64," + "A" * 4000, "more bytes than"),
    ],
)
def test_references_that_lead_nowhere_are_one_sentence(tmp_path: Path, reference: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as refusal:
        read_image(reference, ImagesConfig(folder=str(tmp_path), max_bytes=1000))
    assert len(str(refusal.value)) < 400
    assert str(refusal.value).isprintable()

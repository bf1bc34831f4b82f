"""Images that anybody may have written: what cannot be read is one sentence, and limits hold before decoding."""

import base64
import contextlib
import io
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from configs.runtime.errors import InputError
from configs.schema.target import ImagesConfig
from heads.frozen.media.reading import read_image

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
        (bomb(20_000), "more pixels than"),
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
        ("https://example.org/a.png", "is a URL, and nothing is fetched: set target.images.allow_urls to true"),
        ("../a.png", "lies outside target.images.folder"),
        ("missing.png", "was not found"),
        (".", "is no file here"),
        ("a\0.png", r"image a\\x00.png is no path"),
        ("\ud800\n.png", r"image \\ud800\\n.png is no path"),
        ("data:image/png;base64,@@", "is no data URL"),
        ("data:image/png;base64", "has no comma"),
        ("data:image/png;base64," + "A" * 4000, "more bytes than"),
    ],
)
def test_references_that_lead_nowhere_are_one_sentence(tmp_path: Path, reference: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as refusal:
        read_image(reference, ImagesConfig(folder=str(tmp_path), max_bytes=1000))
    assert len(str(refusal.value)) < 400
    assert str(refusal.value).isprintable()


class Answers(BaseHTTPRequestHandler):
    """Serves a picture, one that never ends, and a redirection."""

    def do_GET(self) -> None:
        packed = "gzip" in self.headers.get("Accept-Encoding", "")  # which a reader may not ask for
        self.send_response(500 if packed else {"/a.png": 200, "/long.png": 200, "/moved.png": 302}.get(self.path, 404))
        self.send_header("Location", "/a.png")
        self.end_headers()
        with contextlib.suppress(OSError):  # the reader hangs up
            self.wfile.write(png() if self.path == "/a.png" else b"x" * 100_000)

    def log_message(self, *arguments: Any) -> None:
        pass


def test_a_url_is_fetched_only_where_that_is_allowed_and_within_limits() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            allowed = ImagesConfig(allow_urls=True, max_bytes=1000, timeout_seconds=10)
            assert read_image(f"{url}/a.png", allowed).size == (4, 3)
            for name, config, says in (
                ("a.png", ImagesConfig(), "nothing is fetched: set target.images.allow_urls to true"),
                ("moved.png", allowed, "was answered with status 302"),
                ("missing.png", allowed, "was answered with status 404"),
                ("long.png", allowed, "more bytes than target.images.max_bytes, 1000"),
            ):
                with pytest.raises(InputError, match=says):
                    read_image(f"{url}/{name}", config)
        finally:
            server.shutdown()
    for nowhere in (f"{url}/a.png", f"http://{'a' * 64}.example/a.png"):
        with pytest.raises(InputError, match="could not be fetched"):
            read_image(nowhere, allowed)

"""One image of a prompt: only formats of pictures are tried, and its size is known before it is decoded."""

from __future__ import annotations

import io
import struct
import warnings
from typing import Any

from configs.runtime.errors import InputError, first_line
from configs.schema.target import ImagesConfig
from heads.frozen.media.reading import opened, refusal

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def read_image(reference: str, config: ImagesConfig) -> Any:
    """Return an image, a `PIL.Image.Image` in RGB, upright; of several frames the first.

    Raises:
        InputError: it cannot be had, is none of `FORMATS`, is damaged, or exceeds a limit of the config.
    """
    return opened(reference, config, lambda content: _decoded(content, reference, config))


def _decoded(content: bytes, reference: str, config: ImagesConfig) -> Any:
    from PIL import Image, ImageOps  # here: text needs none

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is ours
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        width, height = image.size
        if width * height > config.max_pixels:
            found = f"has {width} x {height} pixels, more than target.images.max_pixels, {config.max_pixels}"
            raise refusal(reference, config, found)
        return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as error:
        raise refusal(reference, config, f"has more pixels than Pillow decodes: {first_line(error)}") from error
    except InputError:
        raise
    except (OSError, ValueError, TypeError, SyntaxError, EOFError, MemoryError, OverflowError, struct.error) as error:
        raise refusal(reference, config, f"is no whole image of {', '.join(FORMATS)}: {first_line(error)}") from error

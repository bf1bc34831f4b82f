"""Images and sounds of prompts: opened within limits of size, and made a model's inputs by its processor in transformers.

The rows of data are not trusted: the size of a file is bounded before it is decoded. Rows hold neither pixels nor samples, so
every use of a prompt makes its inputs anew from the references.
P tokens of the longest prompt.
"""

from __future__ import annotations

import base64
import io
import math
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchvision_available, is_vision_available

from configs.runtime.errors import InputError, first_line
from configs.schema.target import AudioConfig, ImagesConfig, MediaConfig, TargetConfig
from heads.frozen.tokenizer import SOUND, with_variables
from heads.inference.causal_lm import MediaInputs
from heads.inference.runner import runner_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # the size of their images is known before they are decoded
RATES = (4000, 192_000)  # samples a second that are accepted
SHORTEST = 0.1  # seconds: of less, audio parts have no whole state
SHOWN = 60  # characters of a reference in messages
OF_ONE_TEXT = {"add_special_tokens": False, "padding": False}  # the template brings its own special tokens
OF_TOKENS = ("mm_token_type_ids", "token_type_ids")
# What Pillow and processors raise for what they cannot read.
UNDECODABLE = (OSError, ValueError, TypeError, SyntaxError, EOFError, MemoryError, OverflowError, struct.error)
FAILURES = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, ImportError)


@dataclass(frozen=True, kw_only=True)
class MediaPrompt:
    """A prompt in the chat template, and paths or data URLs of its images or sounds (behind `SOUND`) in order."""

    text: str
    media: tuple[str, ...]


@dataclass(frozen=True)
class MediaReader:
    """The images or sounds of one target's prompts."""

    processor: Any
    config: ImagesConfig | AudioConfig
    model: PreTrainedModel
    template: str | None = None  # of prompts with them, where the tokenizer's knows none; None: the tokenizer's

    def ids(self, prompt: MediaPrompt) -> list[int]:
        """Return a prompt's token ids, a placeholder for each state of an image or a sound."""
        ids: list[int] = self._processed(prompt)["input_ids"][0].tolist()
        return ids

    def inputs(self, prompts: Sequence[MediaPrompt | None], ids: Sequence[Sequence[int]]) -> MediaInputs | None:
        """Return what the model reads beside the token ids of some rows; None where no row has images or sounds.

        The ids begin with those of the prompts, or a prompt's without its end; they say whether an image was changed since.
        """
        of_media: dict[str, list[Tensor]] = {}
        of_tokens: dict[str, dict[int, Tensor]] = {}
        for row, (prompt, row_ids) in enumerate(zip(prompts, ids, strict=True)):
            if prompt is None:
                continue
            made = self._processed(prompt)
            own = made.pop("input_ids")[0].tolist()[: len(row_ids)]
            if own != list(row_ids[: len(own)]):
                raise InputError(
                    f"{self._named(prompt)} of a row give other tokens than when it was made: one of them, or the processor, "
                    "was changed; make the data again"
                )
            for name, each in made.items():
                if name in OF_TOKENS:
                    of_tokens.setdefault(name, {})[row] = each[0]
                else:
                    of_media.setdefault(name, []).append(each)
        if not of_media:
            return None
        return MediaInputs(
            of_media={name: self._joined(name, each) for name, each in of_media.items()},
            of_tokens={name: self._padded(each, len(ids)) for name, each in of_tokens.items()},
        )

    def _processed(self, prompt: MediaPrompt) -> dict[str, Tensor]:
        if isinstance(config := self.config, ImagesConfig):
            opened: dict[str, Any] = {"images": [read_image(reference, config) for reference in prompt.media]}
        else:
            rate = self.processor.feature_extractor.sampling_rate
            # Without truncation the model refuses a sound that is too long for it.
            settings = {"sampling_rate": rate, "truncation": False}
            opened = {"audio": [read_sound(each, config, rate) for each in prompt.media], "audio_kwargs": settings}
        try:
            made = self.processor(text=[prompt.text], **opened, text_kwargs=OF_ONE_TEXT, return_tensors="pt")
        except FAILURES as error:
            raise InputError(
                f"{type(self.processor).__name__} refuses a prompt with {self._named(prompt)}: {first_line(error)}"
            ) from error
        return {name: each for name, each in made.items() if isinstance(each, Tensor) and name != "attention_mask"}

    def _named(self, prompt: MediaPrompt) -> str:
        return f"{self.config.what}s {', '.join(map(shown, prompt.media))}"

    def _joined(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        if len({part.shape[1:] for part in parts}) > 1:
            raise InputError(
                f"{name} of several rows are of unequal shapes, which {type(self.model).__name__} does not read together; set "
                f"the batch_size to 1, or give {self.config.what}s of one size"
            )
        joined = torch.cat(list(parts)).to(self.model.device)
        return joined.to(self.model.dtype) if joined.is_floating_point() else joined

    def _padded(self, rows: Mapping[int, Tensor], num_rows: int) -> Tensor:
        nothing = next(iter(rows.values())).new_zeros(0)
        return pad_sequence([rows.get(row, nothing) for row in range(num_rows)], batch_first=True).to(self.model.device)


def load_reader(
    path: Path, config: TargetConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> MediaReader | None:
    """Return what reads the images or sounds of a target's prompts; None where the config says that it reads none."""
    settings = config.images or config.audio
    if settings is None:
        return None
    is_image = isinstance(settings, ImagesConfig)
    if is_image and not is_vision_available():
        raise InputError("target.images: reading images needs Pillow; install it with pip install pillow")
    try:
        with _without_videos():
            processor = AutoProcessor.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except FAILURES as error:
        raise InputError(
            f"{settings.key}: {path} has no processor of {settings.what}s that can be read: {first_line(error)}"
        ) from error
    part, placeholder = ("image_processor", "image_token_id") if is_image else ("feature_extractor", "audio_token_id")
    token = getattr(model.config, placeholder, None)
    if getattr(processor, part, None) is None or token is None:
        raise InputError(
            f"{settings.key}: {type(model).__name__} at {path} reads no {settings.what}s; set {settings.key} to null"
        )
    runner_of(model).placeholder = token
    knows = config.chat_template is not None or ("image" if is_image else "audio") in str(tokenizer.chat_template)
    return MediaReader(processor, settings, model, None if knows else with_variables(processor.chat_template, config))


@contextmanager
def _without_videos() -> Iterator[None]:
    """Load no processor of videos where torchvision, which these need, is not installed: no videos are read here."""
    if is_torchvision_available():
        yield
        return
    own = ProcessorMixin.__dict__["get_attributes"]

    def without(cls: type[ProcessorMixin]) -> list[str]:
        return [each for each in own.__func__(cls) if each != "video_processor"]

    ProcessorMixin.get_attributes = classmethod(without)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ProcessorMixin.get_attributes = own  # type: ignore[method-assign]


def read_image(reference: str, config: ImagesConfig) -> Any:
    """Return an image, a `PIL.Image.Image` in RGB, upright; of several frames the first."""
    from PIL import Image, ImageOps  # here: text needs none

    content = _content(reference, config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is ours
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        width, height = image.size
        if width * height <= config.max_pixels:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (*UNDECODABLE, Image.DecompressionBombError) as error:
        raise _refusal(reference, config, f"is no whole image of {', '.join(FORMATS)}: {first_line(error)}") from error
    found = f"has {width} x {height} pixels, more than target.images.max_pixels, {config.max_pixels}"
    raise _refusal(reference, config, found)


def read_sound(reference: str, config: AudioConfig, rate: int) -> np.ndarray:
    """Return the samples of a sound, float32 from -1 to 1, its channels averaged, at `rate` a second."""
    from scipy.io import wavfile  # here: text needs none
    from scipy.signal import resample_poly

    content = _content(reference.removeprefix(SOUND), config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)
            warnings.filterwarnings("error", "Reached EOF", wavfile.WavFileWarning)
            own_rate, read = wavfile.read(io.BytesIO(content))
    except (wavfile.WavFileWarning, *UNDECODABLE) as error:
        raise _refusal(reference, config, f"is no uncompressed WAV file: {first_line(error)}") from error
    if not RATES[0] <= own_rate <= RATES[1]:
        raise _refusal(reference, config, f"has {own_rate} samples a second; {RATES[0]} to {RATES[1]} are taken")
    samples: np.ndarray = read.reshape(len(read), -1).mean(1, dtype=np.float64)
    if read.dtype == np.uint8:  # the only width without a sign
        samples -= 128
    if read.dtype.kind != "f":
        samples /= 2.0 ** (8 * read.dtype.itemsize - 1)
    common = math.gcd(own_rate, rate)
    samples = resample_poly(samples, rate // common, own_rate // common)
    if not SHORTEST * rate <= len(samples) <= config.max_seconds * rate:
        found = f"lasts {len(samples) / rate:.2f} s; {SHORTEST:g} to target.audio.max_seconds, {config.max_seconds:g}, are read"
        raise _refusal(reference, config, found)
    return samples.astype(np.float32)


def shown(reference: str) -> str:
    """Return a reference as messages name it, in one line: the beginning of a long one, what cannot be printed escaped."""
    reference = reference.removeprefix(SOUND)
    reference = reference if len(reference) <= SHOWN else f"{reference[: SHOWN - 3]}..."
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in reference)


def _content(reference: str, config: MediaConfig) -> bytes:
    if reference.startswith(("http://", "https://")):
        raise _refusal(reference, config, "is a URL, and nothing is fetched: give the file")
    try:
        content = _from_data_url(reference) if reference.startswith("data:") else _from_file(reference, config)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # the latter for a NUL, or half of a surrogate pair
        why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise _refusal(reference, config, f"cannot be read: {shown(why)}") from error
    if len(content) > config.max_bytes:
        raise _refusal(reference, config, f"has more bytes than {config.key}.max_bytes, {config.max_bytes}")
    return content


def _from_data_url(reference: str) -> bytes:
    head, _, body = reference.partition(",")
    return base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)


def _from_file(reference: str, config: MediaConfig) -> bytes:
    folder = Path(config.folder or ".")
    path = (folder / reference.removeprefix("file://")).resolve()
    if config.folder is not None and not path.is_relative_to(folder.resolve()):
        raise _refusal(reference, config, f"lies outside {config.key}.folder, {config.folder}")
    with path.open("rb") as file:
        return file.read(config.max_bytes + 1)


def _refusal(reference: str, config: MediaConfig, what: str) -> InputError:
    """Return the error that an image or sound `what`, as in "is no file here"."""
    return InputError(f"{config.what} {shown(reference)} {what}")

"""The processor of a model that reads images or sounds, as transformers has it: prompts to token ids and model inputs.

Every use of a prompt makes its inputs anew from the references: rows of data hold neither pixels nor samples. An image or a
sound that was changed since shows where its tokens are no longer those of the row.
P tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchvision_available, is_vision_available

from configs.runtime.errors import InputError, first_line
from configs.schema.target import AudioConfig, ImagesConfig, TargetConfig
from heads.frozen.media.reading import read_image, read_sound, shown
from heads.inference.media_inputs import MediaInputs, MediaPrompt
from heads.inference.runner import runner_of

OF_ONE_TEXT = {"add_special_tokens": False, "padding": False}  # the template brings its own special tokens
OF_TOKENS = ("mm_token_type_ids", "token_type_ids")
FAILURES = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, ImportError)


@dataclass(frozen=True)
class MediaReader:
    """The images or sounds of one target's prompts.

    Args:
        template: the chat template of prompts with them, where the tokenizer's knows none; None: the tokenizer's.
    """

    processor: Any
    config: ImagesConfig | AudioConfig
    model: PreTrainedModel
    template: str | None = None

    def ids(self, prompt: MediaPrompt) -> list[int]:
        """Return a prompt's token ids, a placeholder for each state of an image or a sound.

        Raises:
            InputError: an image or a sound cannot be read, or the processor refuses the prompt.
        """
        ids: list[int] = self._processed(prompt)["input_ids"][0].tolist()
        return ids

    def inputs(self, prompts: Sequence[MediaPrompt | None], ids: Sequence[Sequence[int]]) -> MediaInputs | None:
        """Return what the model reads beside the token ids of some rows; None where no row has images or sounds.

        Args:
            prompts: of the rows; None: text alone.
            ids: of the rows, which begin with those of their prompts, or a prompt's without its end.

        Raises:
            InputError: as for `ids`; or an image or a sound is not the one that it was when the row was made.
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
        opened = self._opened(prompt.media)
        try:
            made = self.processor(text=[prompt.text], **opened, text_kwargs=OF_ONE_TEXT, return_tensors="pt")
        except FAILURES as error:
            raise InputError(
                f"{type(self.processor).__name__} refuses a prompt with {self._named(prompt)}: {first_line(error)}"
            ) from error
        return {name: each for name, each in made.items() if isinstance(each, Tensor) and name != "attention_mask"}

    def _named(self, prompt: MediaPrompt) -> str:
        return f"{self.config.what}s {', '.join(map(shown, prompt.media))}"

    def _opened(self, media: Sequence[str]) -> dict[str, Any]:
        if isinstance(config := self.config, ImagesConfig):
            return {"images": [read_image(reference, config) for reference in media]}
        rate = self.processor.feature_extractor.sampling_rate
        sounds = [read_sound(reference, config, rate) for reference in media]
        # Without truncation the model refuses a sound that is too long for it.
        return {"audio": sounds, "audio_kwargs": {"sampling_rate": rate, "truncation": False}}

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
    """Return what reads the images or sounds of a target's prompts; None where the config says that it reads none.

    Raises:
        InputError: Pillow is missing, or the target has no processor of images, or of sounds.
    """
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
    if not hasattr(processor, part) or token is None:
        raise InputError(
            f"{settings.key}: {type(model).__name__} at {path} reads no {settings.what}s; set {settings.key} to null"
        )
    runner_of(model).placeholder = token
    knows = config.chat_template is not None or ("image" if is_image else "audio") in str(tokenizer.chat_template)
    return MediaReader(processor, settings, model, None if knows else processor.chat_template)


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

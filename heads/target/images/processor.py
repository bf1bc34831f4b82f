"""The processor of a model that reads images, as transformers has it: prompts with images to token ids and model inputs.

Every use of a prompt makes its inputs anew from the references: rows of data hold no pixels. An image that was changed since
shows where its tokens are no longer those of the row.
P tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoProcessor, PreTrainedModel
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchvision_available, is_vision_available

from configs.runtime.errors import InputError, first_line
from configs.schema.target import ImagesConfig, TargetConfig
from heads.inference.image_inputs import ImageInputs, ImagePrompt, expect_images
from heads.target.images.reading import read_image, shown

OF_TOKENS = ("mm_token_type_ids", "token_type_ids")
FAILURES = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, ImportError)


@dataclass(frozen=True)
class ImageReader:
    """The images of one target's prompts."""

    processor: Any
    config: ImagesConfig
    model: PreTrainedModel

    def ids(self, prompt: ImagePrompt) -> list[int]:
        """Return a prompt's token ids, a placeholder for each state of an image.

        Raises:
            InputError: an image cannot be read, or the processor refuses the prompt.
        """
        ids: list[int] = self._processed(prompt)["input_ids"][0].tolist()
        return ids

    def inputs(self, prompts: Sequence[ImagePrompt | None], ids: Sequence[Sequence[int]]) -> ImageInputs | None:
        """Return what the model reads beside the token ids of some rows; None where no row has images.

        Args:
            prompts: of the rows; None: text alone.
            ids: of the rows, which begin with those of their prompts, or a prompt's without its end.

        Raises:
            InputError: as for `ids`; or an image is not the one that it was when the row was made.
        """
        of_images: dict[str, list[Tensor]] = {}
        of_tokens: dict[str, dict[int, Tensor]] = {}
        for row, (prompt, row_ids) in enumerate(zip(prompts, ids, strict=True)):
            if prompt is None:
                continue
            made = self._processed(prompt)
            own = made.pop("input_ids")[0].tolist()[: len(row_ids)]
            if own != list(row_ids[: len(own)]):
                raise InputError(
                    f"images {', '.join(map(shown, prompt.images))} of a row give other tokens than when it was made: one of "
                    "them, or the processor, was changed; make the data again"
                )
            for name, each in made.items():
                if name in OF_TOKENS:
                    of_tokens.setdefault(name, {})[row] = each[0]
                else:
                    of_images.setdefault(name, []).append(each)
        if not of_images:
            return None
        return ImageInputs(
            of_images={name: self._joined(name, each) for name, each in of_images.items()},
            of_tokens={name: self._padded(each, len(ids)) for name, each in of_tokens.items()},
        )

    def _processed(self, prompt: ImagePrompt) -> dict[str, Tensor]:
        images = [read_image(reference, self.config) for reference in prompt.images]
        try:
            made = self.processor(text=[prompt.text], images=images, add_special_tokens=False, return_tensors="pt")
        except FAILURES as error:
            named = ", ".join(map(shown, prompt.images))
            raise InputError(
                f"{type(self.processor).__name__} refuses a prompt with images {named}: {first_line(error)}"
            ) from error
        return {name: each for name, each in made.items() if isinstance(each, Tensor) and name != "attention_mask"}

    def _joined(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        if len({part.shape[1:] for part in parts}) > 1:
            raise InputError(
                f"{name} of several rows are of unequal shapes, which {type(self.model).__name__} does not read together; set "
                "the batch_size to 1, or give images of one size"
            )
        joined = torch.cat(list(parts)).to(self.model.device)
        return joined.to(self.model.dtype) if joined.is_floating_point() else joined

    def _padded(self, rows: Mapping[int, Tensor], num_rows: int) -> Tensor:
        longest = max(len(each) for each in rows.values())
        nothing = next(iter(rows.values())).new_zeros(longest)
        padded = [
            functional.pad(rows[row], (0, longest - len(rows[row]))) if row in rows else nothing for row in range(num_rows)
        ]
        return torch.stack(padded).to(self.model.device)


def load_reader(path: Path, config: TargetConfig, model: PreTrainedModel) -> ImageReader | None:
    """Return what reads the images of a target's prompts; None where the config says that it reads none.

    Raises:
        InputError: Pillow is missing, or the target has no processor of images.
    """
    if config.images is None:
        return None
    if not is_vision_available():
        raise InputError("target.images: reading images needs Pillow; install it with pip install pillow")
    try:
        with _without_videos():
            processor = AutoProcessor.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except FAILURES as error:
        raise InputError(f"target.images: {path} has no processor of images that can be read: {first_line(error)}") from error
    placeholder = getattr(model.config, "image_token_id", None)
    if not hasattr(processor, "image_processor") or placeholder is None:
        raise InputError(f"target.images: {type(model).__name__} at {path} reads no images; set images to null")
    expect_images(model, placeholder)
    return ImageReader(processor, config.images, model)


@contextmanager
def _without_videos() -> Iterator[None]:
    """Load no processor of videos where torchvision, which these need, is not installed: no videos are read here."""
    if is_torchvision_available():
        yield
        return
    own = ProcessorMixin.get_attributes.__func__  # type: ignore[attr-defined]

    def without(cls: type[ProcessorMixin]) -> list[str]:
        return [each for each in own(cls) if each != "video_processor"]

    with patch.object(ProcessorMixin, "get_attributes", classmethod(without)):
        yield

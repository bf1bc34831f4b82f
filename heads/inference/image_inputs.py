"""What a model that reads images is given beside token ids, and its forward over them.

The ids of a row hold an image's placeholder once for each state that the image has, so that positions, labels and drafts count
tokens as in text. The images themselves are read where a row is read from its beginning: the vision part's states take the
places of the placeholders. Later tokens follow in the cache as after any text; only their rotary positions are moved, where the
family gives an image fewer positions than tokens (`RowCache.offsets_B`).
B rows, T tokens, P tokens of the longest prompt, E width of the target.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from configs.runtime.errors import InputError, first_line
from heads.inference.kv_cache import RowCache


@dataclass(frozen=True, kw_only=True)
class ImagePrompt:
    """A prompt with images, from which a processor makes its token ids and the model's other inputs.

    Args:
        text: in the chat template, one placeholder where each image stands.
        images: paths, data URLs or URLs, in the order of the text.
    """

    text: str
    images: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """What a processor made of the images of some rows, by the name of the model's argument.

    Args:
        of_images: pixels, sizes and the like, of all rows' images one after the other.
        of_tokens: what each token of the prompts is, `[B, P]`; 0 is text.
    """

    of_images: Mapping[str, Tensor]
    of_tokens: Mapping[str, Tensor]


_PLACEHOLDERS: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def expect_images(model: PreTrainedModel, placeholder: int) -> None:
    """Refuse, from now on, to read `placeholder` tokens without the images that they stand for (`check_text`)."""
    _PLACEHOLDERS[model] = placeholder


def placeholder_of(model: PreTrainedModel) -> int | None:
    """Return the token that stands for images; None: the model reads none here."""
    return _PLACEHOLDERS.get(model)


def check_text(model: PreTrainedModel, ids_BT: Tensor, starts: Sequence[int] = (0,)) -> None:
    """Refuse rows, read from their beginning without images, that have a place for one; what is read later is an answer.

    Raises:
        InputError: a token is the placeholder of `expect_images`.
    """
    placeholder = placeholder_of(model)
    if placeholder is not None and max(starts) == 0 and bool((ids_BT == placeholder).any()):
        raise InputError(
            f"a text holds token {placeholder}, which stands for an image, and is read without one: leave that token out of "
            "texts; what reads images is listed in docs/modalities.md"
        )


def read_with_images(
    model: PreTrainedModel, ids_BT: Tensor, images: ImageInputs, cache: RowCache | None = None
) -> tuple[Tensor, Tensor | None]:
    """Read rows from their beginning, images in the places of their tokens.

    Args:
        ids_BT: prompts, or prompts and answers, padded on the right.
        cache: placed at position 0; None: nothing is kept.

    Returns:
        The final, normed states `[B, T, E]`; and for models with positions by axis, by how much the position of a token after
        the images differs from its place in the row, `[B]`.

    Raises:
        InputError: the images do not have as many states as the rows have placeholders, or the model's forward knows no images.
    """
    model_with_vision: Any = model.base_model
    T, takes = ids_BT.shape[1], inspect.signature(model_with_vision.forward).parameters
    of_tokens = {name: functional.pad(each, (0, T - each.shape[1])) for name, each in images.of_tokens.items()}
    given: dict[str, Any] = {name: each for name, each in {**images.of_images, **of_tokens}.items() if name in takes}
    offsets_B = None
    if hasattr(model_with_vision, "get_rope_index"):
        asked = inspect.signature(model_with_vision.get_rope_index).parameters
        grids = {name: each for name, each in {**images.of_images, **of_tokens}.items() if name in asked}
        given["position_ids"], offsets_B1 = model_with_vision.get_rope_index(ids_BT, **grids)
        offsets_B = offsets_B1.view(-1)
    if cache is not None:
        given["past_key_values"] = cache
    try:
        states_BTE: Tensor = model_with_vision(input_ids=ids_BT, use_cache=cache is not None, **given).last_hidden_state
    except (ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(f"{type(model).__name__} cannot read these images: {first_line(error)}") from error
    return states_BTE, offsets_B

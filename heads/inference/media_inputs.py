"""What a model that reads images or sounds is given beside token ids, and its forward over them.

The ids of a row hold a placeholder once for each state that an image or sound has, so that positions, labels and drafts count
tokens as in text. The media themselves are read where a row is read from its beginning: the states of the vision or audio
part take the places of the placeholders. Later tokens follow in the cache as after any text; only their rotary positions are
moved, where the family gives an image fewer positions than tokens (`RowCache.offsets_B`).

In rows a sound's reference stands behind `SOUND`; that of an image is the path or URL itself.
B rows, T tokens, P tokens of the longest prompt, E width of the target.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from configs.runtime.errors import InputError, first_line
from heads.inference.kv_cache import RowCache

SOUND = "sound:"


@dataclass(frozen=True, kw_only=True)
class MediaPrompt:
    """A prompt with images or sounds, from which a processor makes its token ids and the model's other inputs.

    Args:
        text: in the chat template, one placeholder where each image or sound stands.
        media: paths, data URLs or URLs, those of sounds behind `SOUND`, in the order of the text.
    """

    text: str
    media: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MediaInputs:
    """What a processor made of the media of some rows, by the name of the model's argument.

    Args:
        of_media: pixels, sizes, features and the like, of all rows' media one after the other.
        of_tokens: what each token of the prompts is, `[B, P]`; 0 is text.
    """

    of_media: Mapping[str, Tensor]
    of_tokens: Mapping[str, Tensor]


def check_text(placeholder: int | None, ids_BT: Tensor) -> None:
    """Refuse rows, read from their beginning without media, that hold the placeholder of one; None: the model has none.

    Raises:
        InputError: a token is the placeholder.
    """
    if placeholder is not None and bool((ids_BT == placeholder).any()):
        raise InputError(
            f"a text holds token {placeholder}, which stands for an image or a sound, and is read without one: leave that "
            "token out of texts; docs/modalities.md lists what reads them"
        )


def read_with_media(
    model: PreTrainedModel, ids_BT: Tensor, media: MediaInputs, cache: RowCache | None = None
) -> tuple[Tensor, Tensor | None]:
    """Read rows from their beginning, media in the places of their tokens.

    Args:
        ids_BT: prompts, or prompts and answers, padded on the right.
        cache: placed at position 0; None: nothing is kept.

    Returns:
        The final, normed states `[B, T, E]`; and for models with positions by axis, by how much the position of a token after
        the media differs from its place in the row, `[B]`.

    Raises:
        InputError: the media have not as many states as the rows have placeholders, or the model's forward knows none.
    """
    whole: Any = model.base_model
    T, takes = ids_BT.shape[1], inspect.signature(whole.forward).parameters
    of_tokens = {name: functional.pad(each, (0, T - each.shape[1])) for name, each in media.of_tokens.items()}
    given: dict[str, Any] = {name: each for name, each in {**media.of_media, **of_tokens}.items() if name in takes}
    offsets_B = None
    if hasattr(whole, "get_rope_index"):
        asked = inspect.signature(whole.get_rope_index).parameters
        grids = {name: each for name, each in {**media.of_media, **of_tokens}.items() if name in asked}
        given["position_ids"], offsets_B1 = whole.get_rope_index(ids_BT, **grids)
        offsets_B = offsets_B1.view(-1)
    if cache is not None:
        given["past_key_values"] = cache
    try:
        states_BTE: Tensor = whole(input_ids=ids_BT, use_cache=cache is not None, **given).last_hidden_state
    except (ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(f"{type(model).__name__} cannot read these images or sounds: {first_line(error)}") from error
    return states_BTE, offsets_B

"""A target run by servers as a `DecodingForward`: every step asks for the states of each row's whole text.

The cache holds the rows' token ids in place of keys and values, so that rows that end, and tokens that are rejected, are dealt
with as ever. Servers with a prefix cache compute what is new only.
B batch, T new tokens, S cache length, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from heads.frozen.hidden_states import TargetStates
from heads.inference.attention_masks import Masks
from heads.inference.kv_cache import RowCache
from heads.inference.runner import DecodingForward

StatesOfTexts = Callable[[Sequence[Sequence[int]], int, Sequence[int]], TargetStates]


class ServedForward(DecodingForward):
    """The halves of a target whose blocks are elsewhere; its head is here.

    `states_of` takes texts, the number of last tokens that are wanted of each, and taps.
    """

    def __init__(self, model: PreTrainedModel, states_of: StatesOfTexts) -> None:
        self._head, self._states_of = model.get_output_embeddings(), states_of
        self._taps: Sequence[int] = ()
        self._seen: dict[int, Tensor] = {}

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor, masks: Masks, cache: RowCache) -> Tensor:
        if cache.holds_tree:
            raise InputError("decode.tree: servers give the states of texts, and drafts of a tree are none; set tree to null")
        ids_B1T1 = ids_BT[:, None, :, None]
        for layer in range(len(cache.rows)):  # all, since rows are dropped from all
            text_B1S1, _ = cache.update(ids_B1T1, ids_B1T1, layer)
        T, starts = ids_BT.shape[1], cache.rows[0].slots.starts
        rows = [row_S[: start + T] for row_S, start in zip(text_B1S1[:, 0, :, 0].tolist(), starts, strict=True)]
        states = self._states_of(rows, T, self._taps)
        self._seen.update(zip(self._taps, states.taps_ABTE, strict=True))
        return states.final_BTE

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self._head(hidden_BTD)
        return logits_BTV

    def watch(self, taps: Sequence[int], seen: dict[int, Tensor]) -> None:
        self._taps, self._seen = taps, seen

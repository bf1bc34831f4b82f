"""From hidden states to logits: a model's head as the chunked loss applies it, a chunk of rows after the other.

C rows of one chunk, D width of the draft, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import PreTrainedModel

from heads.inference.causal_lm import head_logits
from heads.modules.output_head import autocast_dtype


@dataclass(frozen=True, kw_only=True)
class LogitHead:
    """A function from hidden states to logits, row by row.

    logits_of: `[C, D]` -> `[C, V]`, in the dtype that the matmul gives (bfloat16 under autocast).
    parameters: every tensor inside `logits_of` that may want a gradient. One left out silently gets none.
    """

    logits_of: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]


def model_head(model: PreTrainedModel) -> LogitHead:
    """Return the head of a causal LM, with the soft cap or scale of its architecture; tied or not makes no difference.

    Valid for one batch: frozen weights are cast for autocast at their first use, and kept.
    """
    head = cast(PreTrainedModel, _CachedHead(model))  # `head_logits` reads the config and the output embeddings only
    parameters = tuple(model.get_output_embeddings().parameters())
    return LogitHead(logits_of=lambda hidden_CD: head_logits(head, hidden_CD), parameters=parameters)


class _CachedHead:
    """A causal LM's head that casts its frozen weights once; autocast caches trained weights only."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config, self._head = model.config, model.get_output_embeddings()

    @cached_property
    def _cast_weights(self) -> dict[str, Tensor]:
        """The weights that autocast would cast again for each chunk, in its dtype."""
        dtypes = {name: autocast_dtype(weight) for name, weight in self._head.named_parameters()}
        return {name: self._head.get_parameter(name).to(dtype) for name, dtype in dtypes.items() if dtype is not None}

    @property
    def weight(self) -> Tensor | None:  # by whose dtype `apply_head` casts the states
        return getattr(self._head, "weight", None)

    def get_output_embeddings(self) -> _CachedHead:
        return self

    def __call__(self, hidden: Tensor) -> Tensor:
        if type(self._head) is not nn.Linear:
            return functional_call(self._head, self._cast_weights, (hidden,))
        weights = {**dict(self._head.named_parameters()), **self._cast_weights}
        return functional.linear(hidden, weights["weight"], weights.get("bias"))

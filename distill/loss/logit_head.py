"""From hidden states to logits: a model's head as the fused loss applies it, a chunk of rows after the other.

C rows of one chunk, D width of the draft, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


def model_head(model: PreTrainedModel, num_tokens: int | None = None) -> LogitHead:
    """Return the head of a causal LM, with the soft cap or scale of its architecture; tied or not makes no difference.

    Valid for one batch: frozen weights are cast for autocast here, once for all chunks. `num_tokens`: without padded rows
    beyond them.
    """
    head = cast(PreTrainedModel, _CastHead(model))  # `head_logits` reads the config and the output embeddings only
    parameters = tuple(model.get_output_embeddings().parameters())
    return LogitHead(logits_of=lambda hidden_CD: head_logits(head, hidden_CD)[..., :num_tokens], parameters=parameters)


class _CastHead:
    """A causal LM's head with its frozen weights in autocast's dtype; autocast itself caches trained weights only.

    A linear head is applied without running its module: FSDP and ZeRO-3 gather weights whenever a module runs, in all
    processes together, and processes may have different numbers of chunks.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.config, self._head = model.config, model.get_output_embeddings()
        named = {name: (weight, autocast_dtype(weight)) for name, weight in self._head.named_parameters()}
        self._weights = {name: weight if dtype is None else weight.to(dtype) for name, (weight, dtype) in named.items()}
        self.weight = getattr(self._head, "weight", None)  # by whose dtype `apply_head` casts the states

    def get_output_embeddings(self) -> _CastHead:
        return self

    def __call__(self, hidden: Tensor) -> Tensor:
        if type(self._head) is not nn.Linear:
            return functional_call(self._head, self._weights, (hidden,))
        return functional.linear(hidden, self._weights["weight"], self._weights.get("bias"))

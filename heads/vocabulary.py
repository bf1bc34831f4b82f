"""The reduced draft vocabulary: a draft that proposes only W of the target's V tokens computes W logits.

`d2t` holds the target's id of each draft token, `t2d` marks them among all of the target's. Ids rise, so that inverse transform
sampling meets the tokens in the same order in either vocabulary. Other tokens have q = 0; verification stays exact, and the
mass that p has there comes as the residual.
B batch, D width, V target vocabulary, W draft vocabulary; `...` any leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.runtime.errors import InputError, first_line
from heads.inference.causal_lm import head_rows


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftVocabulary:
    """Which of the target's tokens a draft can propose."""

    token_ids_W: Tensor  # int64, strictly rising, the target's id of each draft token (d2t)
    target_vocab_size: int  # V

    def __post_init__(self) -> None:
        ids_W = self.token_ids_W
        if ids_W.ndim != 1 or ids_W.dtype != torch.int64 or len(ids_W) == 0:
            raise ValueError(f"draft token ids must be a list of int64, got {ids_W.dtype} of shape {list(ids_W.shape)}")
        if not bool((ids_W[1:] > ids_W[:-1]).all()):
            raise ValueError("draft token ids must rise and name each token once")
        for token in (int(ids_W[0]), int(ids_W[-1])):
            if not 0 <= token < self.target_vocab_size:
                raise ValueError(f"draft token id {token} lies outside the target's vocabulary of {self.target_vocab_size}")

    def __len__(self) -> int:
        return len(self.token_ids_W)

    @property
    def is_drafted_V(self) -> Tensor:
        """Bool, whether the draft can propose each of the target's tokens (t2d)."""
        return torch.zeros(self.target_vocab_size, dtype=torch.bool).index_fill_(0, self.token_ids_W.cpu(), True)

    def to(self, device: torch.device) -> DraftVocabulary:
        return DraftVocabulary(token_ids_W=self.token_ids_W.to(device), target_vocab_size=self.target_vocab_size)

    def write(self, path: Path) -> None:
        """Write `d2t` (int64 `[W]`) and `t2d` (bool `[V]`) as a safetensors file."""
        save_file({"d2t": self.token_ids_W.cpu().contiguous(), "t2d": self.is_drafted_V}, path)


def target_ids(vocabulary: DraftVocabulary | None, drafted: Tensor) -> Tensor:
    """Return the target's ids of draft tokens `[...]`; without a vocabulary they are these."""
    return drafted if vocabulary is None else vocabulary.token_ids_W[drafted]


def over_target(vocabulary: DraftVocabulary | None, values_BW: Tensor, fill: float) -> Tensor:
    """Return values `[..., W]` at the ids of their tokens in the target's vocabulary, `[..., V]`, with `fill` elsewhere."""
    if vocabulary is None:
        return values_BW
    values_BV = values_BW.new_full((*values_BW.shape[:-1], vocabulary.target_vocab_size), fill)
    return values_BV.index_copy_(-1, vocabulary.token_ids_W, values_BW)


def keep_head_rows(model: PreTrainedModel, vocabulary: DraftVocabulary) -> None:
    """Replace a causal LM's head, in place, by a frozen one of W rows. Its input embeddings stay whole."""
    weight_WD, bias_W = head_rows(model, vocabulary.token_ids_W.to(model.device))
    W, D = weight_WD.shape
    reduced = nn.Linear(D, W, bias=bias_W is not None, device=weight_WD.device, dtype=weight_WD.dtype)
    reduced.weight = nn.Parameter(weight_WD.detach(), requires_grad=False)
    if bias_W is not None:
        reduced.bias = nn.Parameter(bias_W.detach(), requires_grad=False)
    model.set_output_embeddings(reduced)
    model.config.get_text_config().tie_word_embeddings = False  # or the next `tie_weights` would undo it


def read_draft_vocabulary(path: Path) -> DraftVocabulary:
    """Read back what `DraftVocabulary.write` wrote."""
    try:
        tensors = load_file(path)
        vocabulary = DraftVocabulary(token_ids_W=tensors["d2t"], target_vocab_size=len(tensors["t2d"]))
        agrees = tensors["t2d"].dtype == torch.bool and torch.equal(vocabulary.is_drafted_V, tensors["t2d"])
    except KeyError as error:
        raise InputError(f"draft vocabulary {path} must hold d2t and t2d, and lacks {error}") from error
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise InputError(f"draft vocabulary {path} cannot be read: {first_line(error)}") from error
    if not agrees:
        raise InputError(f"draft vocabulary {path}: t2d marks other tokens than d2t names")
    return vocabulary

"""The output head of every head family (`DraftHead`), and the base class of all heads (`HeadModule`).

The output head leads from a state of the target's width to logits over the draft vocabulary. It starts as the target's own
head, whole or the rows of a reduced vocabulary. Whole and frozen it is the target's head, not a copy, and nothing of it is
saved.
B batch, N rows, D width, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.heads import HeadSettings
from heads.frozen.hidden_states import TargetStates
from heads.inference.causal_lm import head_logits, head_rows
from heads.inference.lean_forward import PackedLinear
from heads.modules.interface import Depth
from heads.vocabulary import DraftVocabulary


class DraftHead(nn.Module):
    """A linear head, soft-capped or scaled as the target's, which it starts from; learnt apart from that where `trainable`.

    The vocabulary, None being the target's, is kept as the buffer `token_ids` (d2t).
    """

    weight: nn.Parameter | Tensor | None
    bias: nn.Parameter | Tensor | None
    token_ids: Tensor | None

    def __init__(self, target: PreTrainedModel, vocabulary: DraftVocabulary | None, *, trainable: bool) -> None:
        super().__init__()
        self._target = (target,)  # in a tuple: neither trained nor saved with the head
        self._vocabulary: DraftVocabulary | None = None
        self._cast: tuple[object, Tensor] | None = None  # the frozen weight in autocast's dtype, and what it was made of
        self._packed: PackedLinear | None = None
        self.vocab_size = target.config.get_text_config().vocab_size
        ids_W = None if vocabulary is None else vocabulary.token_ids_W.to(target.device)
        self.register_buffer("token_ids", ids_W, persistent=False)  # the artifact has a file for it
        shared = vocabulary is None and not trainable
        wanted_W = torch.arange(1 if shared else self.vocab_size, device=target.device) if ids_W is None else ids_W
        weight_WD, bias_W = head_rows(target, wanted_W)  # also where nothing is copied: it refuses heads that are not linear
        for name, value in (("weight", weight_WD), ("bias", bias_W)):
            if shared or value is None:
                setattr(self, name, None)
            elif trainable:
                self.register_parameter(name, nn.Parameter(value.detach().float().clone()))
            else:
                self.register_buffer(name, value.detach().clone())

    @property
    def parameters_used(self) -> tuple[Tensor, ...]:
        """Every tensor that the logits depend on."""
        return tuple(each for each in self._weights() if each is not None)

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The tokens it can propose; None: all of the target's."""
        if self.token_ids is None:
            return None
        if self._vocabulary is None or self._vocabulary.token_ids_W is not self.token_ids:  # else its checks wait each time
            self._vocabulary = DraftVocabulary(token_ids_W=self.token_ids, target_vocab_size=self.vocab_size)
        return self._vocabulary

    @property
    def config(self) -> object:
        return self._target[0].config

    def get_output_embeddings(self) -> Callable[[Tensor], Tensor]:
        """Return what makes raw logits; this and `config` are for `heads.inference.causal_lm.head_logits`."""
        weight_WD, bias_W = self._weights()
        if (packed := self._packed) is not None:
            return lambda hidden: packed(hidden.to(weight_WD.dtype))
        if (dtype := autocast_dtype(weight_WD)) is not None:  # cast once: a loss asks for logits some rows at a time
            made_of = weight_WD.data_ptr(), weight_WD._version, dtype
            if self._cast is None or self._cast[0] != made_of:
                with torch.inference_mode(mode=False):
                    self._cast = made_of, weight_WD.to(dtype)
            weight_WD = self._cast[1]
        return lambda hidden: functional.linear(hidden.to(weight_WD.dtype), weight_WD, bias_W)

    def join(self) -> Sequence[nn.Module]:
        """See `heads.inference.lean_forward.Joins`; the target's own head is left to it."""
        if self.weight is not None:
            self._packed = PackedLinear([cast(nn.Linear, self)])
        return []

    def logits(self, hidden: Tensor) -> Tensor:
        return head_logits(self, hidden)

    @property
    def num_tokens(self) -> int:
        return self.vocab_size if self.token_ids is None else len(self.token_ids)

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        if self.weight is not None:
            return self.weight, self.bias
        head = cast(nn.Linear, self._target[0].get_output_embeddings())
        return head.weight, head.bias


def autocast_dtype(weight: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast casts a weight to at every use; None where it does not, or, of trained ones, keeps it."""
    kind = weight.device.type
    is_cast = weight.dtype == torch.float32 and not weight.requires_grad and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_cast else None


class HeadModule(nn.Module):
    """A head on a frozen target, whose parameters and buffers are what the artifact holds.

    `forward(batch, states)` returns a list of `Depth`, the nearest token first, given the target's states over the batch.
    The target is kept in a tuple, so that it is neither trained nor saved with the head.
    """

    settings: HeadSettings  # with nothing left open that the target decides: an artifact is rebuilt from these
    lm_head: DraftHead
    taps: Sequence[int] = ()  # the target's hidden states that it reads besides the final one
    num_caches = 0  # layers whose keys and values are kept while drafting

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        check_widths(target)
        self._target = (target,)

    @property
    def target(self) -> PreTrainedModel:
        return self._target[0]

    def features(self, states: TargetStates) -> Tensor:
        """Return what the head reads of the target's states, `[B, T, F]`; by default the final ones in its own dtype."""
        return states.final_BTE.to(self.dtype)

    @property
    def token_ids_W(self) -> Tensor | None:
        return self.output_head(0).token_ids

    def output_head(self, depth: int) -> DraftHead:
        """Return the output head for the tokens of a depth, counted from 0; all have the same vocabulary."""
        return self.lm_head

    def depth_weight(self, depth: int) -> float:
        """Return the weight in the loss of a depth, counted from 0."""
        return self.settings.depth_decay**depth

    @property
    def weighs_by_acceptance(self) -> bool:
        """Whether training weighs each row by how far its draft is likely to be accepted (`HeadObjective`)."""
        return False

    def at_depth(self, depth: int, hidden_ND: Tensor, origins_N: Tensor, *, row_weights_N: Tensor | None = None) -> Depth:
        """Return the `Depth` of the tokens at a depth, counted from 0, from final states at these origins."""
        head = self.output_head(depth)
        return Depth(
            hidden_ND=hidden_ND,
            origins_N=origins_N,
            target_places_N=origins_N + depth + 1,
            logits_of=head.logits,
            parameters=head.parameters_used,
            weight=self.depth_weight(depth),
            row_weights_N=row_weights_N,
        )

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return the target's embeddings `[B, T, D]` in the head's dtype."""
        return self._target[0].get_input_embeddings()(ids_BT).to(self.dtype)


def check_widths(target: PreTrainedModel) -> None:
    """Refuse a target whose embedding or output head has another width than its states, as OPT-350m."""
    width, head = target.config.get_text_config().hidden_size, target.get_output_embeddings()
    widths = {cast(nn.Embedding, target.get_input_embeddings()).weight.shape[1]}
    if isinstance(head, nn.Linear):  # another kind is refused by `heads.inference.causal_lm.head_rows`
        widths.add(head.in_features)
    if not widths <= {width}:
        raise InputError(
            f"{type(target).__name__} has states of width {width} and an embedding or output head of width "
            f"{', '.join(map(str, sorted(widths - {width})))}: heads need one width; distil a draft LM, or take another target"
        )

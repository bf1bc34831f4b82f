"""Some columns of the output head for one batch: a loss over them estimates that over the whole draft vocabulary.

Sampled softmax (Jean et al. 2015, arXiv 1412.2007): frequent tokens and the batch's own labels are always there; of the others
some are drawn, all equally likely, and each stands for as many as there are for each drawn one. The sums of exp(logits) and of
probabilities over the columns are then unbiased estimates of those over the vocabulary; a divergence, in which their logarithm
stands, is nearly so.
S columns, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.device import upload
from heads.modules.interface import Batch


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of one batch, in host memory.

    places_S: int64, rising, which of the draft's tokens.
    token_ids_S: int64, the target's id of each.
    log_weights_S: float32, log of how many of the draft's tokens each stands for.
    """

    places_S: Tensor
    token_ids_S: Tensor
    log_weights_S: Tensor

    def to(self, device: torch.device) -> Columns:
        """Return them on a device; the host does not wait."""
        return Columns(
            places_S=upload(self.places_S, device),
            token_ids_S=upload(self.token_ids_S, device),
            log_weights_S=upload(self.log_weights_S, device),
        )


class ColumnSampler:
    """Draws the columns of each batch from torch's generator of the host.

    Args:
        token_ids_W: rising, the target's id of each of the draft's tokens.
        kept_ids: tokens that are always there, as the target's ids; those that the draft cannot propose count for nothing.
        num_columns: S; as many as there are tokens at most.
    """

    def __init__(self, token_ids_W: Tensor, kept_ids: Tensor, num_columns: int) -> None:
        self.token_ids_W, self.num_columns = token_ids_W.cpu(), min(num_columns, len(token_ids_W))
        self._is_kept_W = torch.isin(self.token_ids_W, kept_ids.cpu())

    def draw(self, batch: Batch) -> Columns:
        """Return the columns for a batch: more than S where those that are always there leave less than a quarter of it."""
        host = batch.on_host
        labels_N = host.input_ids_BT[host.loss_mask_BT].unique()
        is_chosen_W = self._is_kept_W | torch.isin(self.token_ids_W, labels_N)
        rest_R = (~is_chosen_W).nonzero().squeeze(1)
        num_drawn = max(self.num_columns - int(is_chosen_W.sum()), self.num_columns // 4, 1)
        drawn = rest_R[torch.randperm(len(rest_R))[:num_drawn]]
        log_weights_W = torch.zeros(len(self.token_ids_W))
        log_weights_W[drawn] = math.log(len(rest_R) / len(drawn)) if len(drawn) else 0.0
        is_chosen_W[drawn] = True
        places_S = is_chosen_W.nonzero().squeeze(1)
        return Columns(places_S=places_S, token_ids_S=self.token_ids_W[places_S], log_weights_S=log_weights_W[places_S])

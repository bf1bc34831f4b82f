"""Where block drafters start their blocks in training: at anchors drawn from each conversation.

A block's anchor stands at position a = j + 1 of origin j: the pending token, known but not read by the target. Slot s of the
block (from 1) says x_{a+s}, which is depth s - 1 of origin j (`heads.training`). A block is drafted from tokens that the
target wrote, so anchors are answers' tokens, followed by another one.
B batch, T positions, A anchors of a row, N anchors of the batch, C conversations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.training import HeadInputs, labelled_origins


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """Anchors by row, padded on the right to at least one.

    Args:
        places_BA: int64, columns of the anchors in their rows, rising; 0 on padding.
        valid_BA: bool, False on padding.
        weights_BA: float32, how many of its conversation's possible anchors each one stands for; 0 on padding.
    """

    places_BA: Tensor
    valid_BA: Tensor
    weights_BA: Tensor

    def labelled(self, inputs: HeadInputs, slot: int) -> Tensor:
        """Return the anchors `[B, A]` whose token at `slot` is a label in the same document, bool."""
        T = inputs.input_ids_BT.shape[1]
        label_BA = (self.places_BA + slot).clamp(max=T - 1)
        documents_BT = inputs.document_ids_BT
        together_BA = documents_BT.gather(1, label_BA) == documents_BT.gather(1, self.places_BA)
        inside_BA = self.places_BA + slot < T
        return self.valid_BA & inside_BA & together_BA & inputs.loss_mask_BT.gather(1, label_BA)

    def visible(self, document_ids_BT: Tensor) -> Tensor:
        """Return which positions `[B, A, T]` each anchor's block reads the target's states of: those before it, bool."""
        places_T = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
        earlier_BAT = places_T < self.places_BA.unsqueeze(-1)
        return earlier_BAT & (document_ids_BT.unsqueeze(1) == document_ids_BT.gather(1, self.places_BA).unsqueeze(-1))


def choose_anchors(inputs: HeadInputs, limit: int | None) -> Anchors:
    """Choose anchors: `limit` of each conversation at random, by torch's own generator, or all of them.

    Weighted as they say, the drawn ones give sums whose mean is that of all.
    """
    T = inputs.input_ids_BT.shape[1]
    origins_N = labelled_origins(inputs, 0)
    origins_N = origins_N[inputs.loss_mask_BT.flatten()[origins_N + 1]]
    weights_N = torch.ones(len(origins_N), device=origins_N.device)
    if limit is not None:
        rank_N, count_N = _drawn(origins_N // T, inputs.document_ids_BT.flatten()[origins_N])
        kept_N = rank_N < limit
        origins_N, weights_N = origins_N[kept_N], (count_N / count_N.clamp(max=limit))[kept_N]
    rows_N, per_row_B = origins_N // T, torch.bincount(origins_N // T, minlength=len(inputs.input_ids_BT))
    column_N = torch.arange(len(rows_N), device=rows_N.device) - (per_row_B.cumsum(0) - per_row_B)[rows_N]
    places_BA = origins_N.new_zeros(len(per_row_B), max(1, int(per_row_B.max())))
    weights_BA = torch.zeros_like(places_BA, dtype=torch.float32)
    places_BA[rows_N, column_N] = origins_N % T + 1
    weights_BA[rows_N, column_N] = weights_N
    return Anchors(places_BA=places_BA, valid_BA=places_BA > 0, weights_BA=weights_BA)


def _drawn(rows_N: Tensor, documents_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank of each possible anchor in a random order of its conversation's, and how many that has.

    Args:
        rows_N: rising.
        documents_N: rising within a row; a conversation is a document of a row.
    """
    changes_N = torch.ones_like(rows_N)
    changes_N[1:] = (rows_N[1:] != rows_N[:-1]) | (documents_N[1:] != documents_N[:-1])
    own_N = changes_N.cumsum(0) - 1
    counts_C = torch.bincount(own_N)
    order_N = (own_N + torch.rand(len(own_N), dtype=torch.float64, device=own_N.device)).argsort()
    rank_N = torch.empty_like(own_N)
    rank_N[order_N] = torch.arange(len(own_N), device=own_N.device) - (counts_C.cumsum(0) - counts_C)[own_N]
    return rank_N, counts_C[own_N]

"""Training of block drafters (`heads.families.block.dflash`): where their blocks start, and attention of many blocks at once.

A block's anchor stands at position a = j + 1 of origin j: the pending token, known but not read by the target. Anchors are
tokens of the target's own, followed by another one. The slots of a block attend to the target's context before the anchor and
to all slots of their own block, in one softmax, exactly as when drafting; blocks do not see each other.
B batch, T positions, A blocks (anchors) of a row, S slots of a block, X = A * S, N heads, M key-value heads, G = N / M, H head
width, C conversations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.device import upload
from heads.modules.attention import Ranges, read_ranges
from heads.modules.interface import Batch, labelled_origins
from heads.modules.layers import DraftAttention, LayerKeys, Rotation


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """Anchors by row, padded on the right to at least one; in host memory.

    Args:
        places_BA: int64, columns of the anchors in their rows, rising; 0 on padding.
        valid_BA: bool, False on padding.
        weights_BA: float32, how many of its conversation's possible anchors each one stands for; 0 on padding.
    """

    places_BA: Tensor
    valid_BA: Tensor
    weights_BA: Tensor

    def labelled(self, batch: Batch, ahead: int) -> Tensor:
        """Return the anchors `[B, A]` for which the token so many places on is a label in the same document, bool."""
        batch, T = batch.on_host, batch.input_ids_BT.shape[1]
        label_BA = (self.places_BA + ahead).clamp(max=T - 1)
        documents_BT = batch.document_ids_BT
        together_BA = documents_BT.gather(1, label_BA) == documents_BT.gather(1, self.places_BA)
        inside_BA = self.places_BA + ahead < T
        return self.valid_BA & inside_BA & together_BA & batch.loss_mask_BT.gather(1, label_BA)

    def tokens(self, batch: Batch, first: int, count: int) -> Tensor:
        """Return the ids `[B, A, count]` from `first` places behind the anchors on; past a row's edge its outermost token."""
        T = batch.input_ids_BT.shape[1]
        columns = (self.places_BA.unsqueeze(-1) + torch.arange(first, first + count)).clamp(0, T - 1)
        columns = upload(columns, batch.input_ids_BT.device)
        return batch.input_ids_BT.gather(1, columns.flatten(1)).unflatten(1, (-1, count))


def choose_anchors(batch: Batch, limit: int | None) -> Anchors:
    """Choose anchors: `limit` of each conversation at random, by torch's own generator, or all of them.

    With their weights, sums over the drawn ones have the mean of sums over all.
    """
    batch, T = batch.on_host, batch.input_ids_BT.shape[1]
    origins_N = labelled_origins(batch, 0)
    origins_N = origins_N[batch.loss_mask_BT.flatten()[origins_N + 1]]
    weights_N = torch.ones(len(origins_N))
    if limit is not None:
        rank_N, count_N = _drawn(origins_N // T, batch.document_ids_BT.flatten()[origins_N])
        kept_N = rank_N < limit
        origins_N, weights_N = origins_N[kept_N], (count_N / count_N.clamp(max=limit))[kept_N]
    rows_N, per_row_B = origins_N // T, torch.bincount(origins_N // T, minlength=len(batch.input_ids_BT))
    column_N = torch.arange(len(rows_N)) - (per_row_B.cumsum(0) - per_row_B)[rows_N]
    places_BA = origins_N.new_zeros(len(per_row_B), max(1, int(per_row_B.max())))
    weights_BA = torch.zeros_like(places_BA, dtype=torch.float32)
    places_BA[rows_N, column_N] = origins_N % T + 1
    weights_BA[rows_N, column_N] = weights_N
    return Anchors(places_BA=places_BA, valid_BA=places_BA > 0, weights_BA=weights_BA)


def before_anchors(places_BA: Tensor, positions_BA: Tensor) -> Ranges:
    """Return which positions blocks read the target's states of: those before their anchors in its document.

    Args:
        places_BA: columns of the anchors in their rows.
        positions_BA: theirs in their documents.
    """
    return Ranges(first_BX=places_BA - positions_BA, end_BX=places_BA)


class BlockKeys(LayerKeys):
    """What blocks see besides themselves: of a context, turned by `rotation`, their ranges, one for all slots of a block."""

    def __init__(self, context_BTD: Tensor, rotation: Rotation, ranges: Ranges) -> None:
        self.context_BTD, self.rotation, self.ranges = context_BTD, rotation, ranges

    def attend(self, attention: DraftAttention, states_BXD: Tensor, rotation: Rotation) -> Tensor:
        """Return the attention output `[B, X, D]` of all blocks' slots, block after block."""
        context = attention.keys_values(self.context_BTD, self.rotation)
        own = attention.keys_values(states_BXD, rotation)
        return attention.output(mix_blocks(attention.queries(states_BXD, rotation), context, own, self.ranges))


def mix_blocks(q_BNXH: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], ranges: Ranges) -> Tensor:
    """Return mixed values `[B, N, X, H]`.

    Args:
        q_BNXH: queries of the slots.
        context: keys and values `[B, M, T, H]` of the row.
        own: keys and values `[B, M, X, H]` of the slots.
        ranges: of the row, one for each block.
    """
    A = ranges.first_BX.shape[1]
    S = q_BNXH.shape[2] // A
    of_slots = Ranges(first_BX=ranges.first_BX.repeat_interleave(S, 1), end_BX=ranges.end_BX.repeat_interleave(S, 1))
    read_BNXH, log_sum_BNX = read_ranges(q_BNXH, *context, of_slots)
    k_BMASH, v_BMASH = (each.unflatten(2, (A, S)) for each in own)
    by_block = (each.unflatten(1, (k_BMASH.shape[1], -1)).unflatten(3, (A, S)) for each in (q_BNXH, read_BNXH, log_sum_BNX))
    q_BMGASH, read_BMGASH, log_sum_BMGAS = by_block
    own_BMGASR = torch.einsum("bmgash,bmarh->bmgasr", q_BMGASH, k_BMASH).to(log_sum_BNX.dtype) * q_BNXH.shape[-1] ** -0.5
    weights = torch.cat([log_sum_BMGAS.unsqueeze(-1), own_BMGASR], -1).softmax(-1).to(v_BMASH.dtype)
    own_BMGASH = torch.einsum("bmgasr,bmarh->bmgash", weights[..., 1:], v_BMASH)
    return (weights[..., :1] * read_BMGASH + own_BMGASH).flatten(3, 4).flatten(1, 2)


def _drawn(rows_N: Tensor, documents_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank of each possible anchor in a random order of its conversation's, and how many that has.

    Rows rise, and so do documents within a row; a conversation is a document of a row.
    """
    changes_N = torch.ones_like(rows_N)
    changes_N[1:] = (rows_N[1:] != rows_N[:-1]) | (documents_N[1:] != documents_N[:-1])
    own_N = changes_N.cumsum(0) - 1
    counts_C = torch.bincount(own_N)
    order_N = (own_N + torch.rand(len(own_N), dtype=torch.float64)).argsort()
    rank_N = torch.empty_like(own_N)
    rank_N[order_N] = torch.arange(len(own_N)) - (counts_C.cumsum(0) - counts_C)[own_N]
    return rank_N, counts_C[own_N]

"""The interface between head families and training: the batch, the target's states, and a `Depth` for each future token.

Origins and depths: at origin j the target has read x_0..x_j, and x_{j+1} is known (when decoding: the pending token). Depth
k (from 0) is the head's prediction of x_{j+2+k}, made with x_{j+2}..x_{j+1+k} given. It is compared with the target's
distribution at position j + 1 + k. Medusa's heads do not read x_{j+1} but have the same origins. A depth is trained where its
label x_{j+2+k} was written by the target and lies in the same document as the origin.
B batch, T positions, C conversations of a row at most, P = B * T flat places, N rows of one depth, V target vocabulary, D width
of the head's last state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema.heads import HeadSettings
from heads.device import upload
from heads.frozen.loading import Target
from heads.frozen.media import MediaPrompt
from heads.inference.causal_lm import MediaInputs
from heads.proposers.protocol import Proposer
from heads.vocabulary import DraftVocabulary

NO_DOCUMENT = -1


class Batch(NamedTuple):
    """Right-padded rows, of one conversation each or of several; a tuple, for accelerate and DDP.

    The loss mask marks the **label**: position t is True where token t was written by the target (end-of-text included), and
    the logits at t - 1 predict it. The first position of a document is never a label.
    """

    input_ids_BT: Tensor  # int64; 0 on padding
    loss_mask_BT: Tensor  # bool; False on padding
    position_ids_BT: Tensor  # int64, from 0 in each document; runs on over padding
    document_ids_BT: Tensor  # int64; which document of its row a token belongs to, from 0; NO_DOCUMENT on padding
    conversations_BC: Tensor  # int64; which conversation of the data file each document is, from 0; NO_DOCUMENT beyond the last
    origin: Origin | None = None  # of a batch that was moved from the host to a device
    media: BatchMedia | None = None  # None: no row has any
    signals: object = None  # the target's, where a cache was read or servers were asked ahead (`distill.signals`)

    @property
    def packed_positions_BT(self) -> Tensor | None:
        """Position ids for a forward that keeps packed documents apart; None where every row is a single one."""
        return self.position_ids_BT if self.conversations_BC.shape[1] > 1 else None

    @property
    def num_labels(self) -> int:
        return int(self.on_host.loss_mask_BT[:, 1:].sum())

    @property
    def on_host(self) -> Batch:
        """This batch in host memory, where places of labels are looked up; one made on a device is copied, and waited for."""
        if self.origin is not None and all(mine is moved for mine, moved in zip(self, self.origin.moved, strict=False)):
            return self.origin.batch
        return Batch._make((*(tensor.cpu() for tensor in self[:5]), None, self.media, self.signals))

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch on a device, as accelerate asks for it; the host does not wait for the copy."""
        device = torch.device(device)
        if device.type == "cpu":
            return self.on_host
        host = self.on_host
        moved = [upload(tensor, device) for tensor in host[:5]]
        return Batch._make((*moved, Origin(host, moved), self.media, self.signals))

    def media_inputs(self, target: Target) -> MediaInputs | None:
        """Return what the target reads of the rows' media; None where no row has any."""
        return None if self.media is None else target.media_inputs(self.media.rows, self.on_host.input_ids_BT.tolist())


@dataclass(frozen=True)
class BatchMedia:
    """The prompts of a batch's rows that have media, None in the place of the others. No tuple, as `Origin`."""

    rows: tuple[MediaPrompt | None, ...]

    @classmethod
    def of(cls, rows: Sequence[MediaPrompt | None]) -> BatchMedia | None:
        return cls(tuple(rows)) if any(row is not None for row in rows) else None


@dataclass(frozen=True)
class Origin:
    """A batch in host memory, and the tensors on a device that it was moved to. No tuple: DDP moves whatever is in those."""

    batch: Batch
    moved: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class Normalisers:
    """Log-normalisers of the target's logits at flat places b * T + t of a batch; 0 where they were not computed."""

    log_sum_P: Tensor  # float32 or float64, log of the sum of exp(logits) over all V
    top1_P: Tensor  # int64, the likeliest token


@dataclass(frozen=True, kw_only=True)
class Auxiliary:
    """A further prediction of a `Depth`'s rows, which counts in the loss alone: logits of an earlier stage of the head."""

    hidden_ND: Tensor
    logits_of: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    weight: float  # of its divergence, relative to that of the depth's own prediction


@dataclass(frozen=True, kw_only=True)
class Depth:
    """A head's prediction of one future token, at N of the batch's origins."""

    hidden_ND: Tensor  # what `logits_of` turns into logits over the draft vocabulary
    origins_N: Tensor  # int64 in host memory, flat places b * T + j
    target_places_N: Tensor  # int64 in host memory, flat places whose target distribution each row is compared with
    logits_of: Callable[[Tensor], Tensor]  # the head, `[C, D]` to `[C, W]`, any rows at a time
    parameters: tuple[Tensor, ...]  # all tensors that `logits_of` depends on
    weight: float = 1.0  # of this depth in the loss, relative to the others
    row_weights_N: Tensor | None = None  # relative; None: all alike
    confidence_N: Tensor | None = None  # logits of the head's own estimate of its acceptance sum_v min(p, q); None: it has none
    confidence_weight: float = 0.0  # of the estimate's cross-entropy, relative to the divergence
    auxiliaries: tuple[Auxiliary, ...] = ()  # further predictions in this depth's loss


@dataclass(frozen=True, kw_only=True)
class Family:
    """One way of building heads; every file of `heads.families` that defines one ends with it."""

    settings: type[HeadSettings]
    # Makes the module, with new weights, from settings, target and draft vocabulary (None: all tokens).
    build: Callable[[Any, PreTrainedModel, DraftVocabulary | None], nn.Module]
    propose: Callable[[Any, torch.device], Proposer]  # of a module that `heads.families.registry.serve` returned, on a device
    # For a module that is about to be trained, and its target: gives it further weights, or refuses the target.
    start: Callable[[Any, PreTrainedModel], None] | None = None


def labelled_origins(batch: Batch, depth: int) -> Tensor:
    """Return the places `[N]`, in host memory, of origins whose token at `depth` (from 0) is a label in the same document."""
    batch, ahead = batch.on_host, depth + 2
    T = batch.input_ids_BT.shape[1]
    if ahead >= T:
        return batch.input_ids_BT.new_zeros(0)
    documents_BT = batch.document_ids_BT
    together_BT = documents_BT[:, :-ahead] == documents_BT[:, ahead:]
    usable_BT = batch.loss_mask_BT[:, ahead:] & together_BT & (documents_BT[:, :-ahead] >= 0)
    rows_N, places_N = usable_BT.nonzero(as_tuple=True)
    return rows_N * T + places_N


def origins_of_any_depth(batch: Batch, num_depths: int) -> tuple[Tensor, Tensor]:
    """Return which origins of each row have a label at one of the first depths, and where each of them is found again.

    Both lie in host memory: places `[B, X]` in the row, in order, X being at least 1 and rows of fewer ending in position 0;
    and for each flat place b * T + j of such an origin its flat place b * X + x in there, `[B * T]`, 0 for others.
    """
    num_rows, T = batch.on_host.input_ids_BT.shape
    origins_N = torch.cat([labelled_origins(batch, depth) for depth in range(num_depths)]).unique()
    rows_N, columns_N, origins_BX = by_row(origins_N, num_rows, T)
    chosen_places_P = origins_N.new_zeros(num_rows * T)
    chosen_places_P[origins_N] = rows_N * origins_BX.shape[1] + columns_N
    return origins_BX, chosen_places_P


def by_row(places_N: Tensor, num_rows: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row and the column of each flat place b * T + t, which rise, in the last result: places t by row, `[B, X]`.

    X is at least 1, and shorter rows end in zeros.
    """
    rows_N = places_N // T
    counts_B = torch.bincount(rows_N, minlength=num_rows)
    columns_N = torch.arange(len(rows_N)) - (counts_B.cumsum(0) - counts_B)[rows_N]
    places_BX = places_N.new_zeros(num_rows, max(1, int(counts_B.max())))
    places_BX[rows_N, columns_N] = places_N % T
    return rows_N, columns_N, places_BX


def before_labels(batch: Batch) -> Tensor:
    """Return which positions predict a label, bool `[B, T]`."""
    before_label_BT = torch.zeros_like(batch.loss_mask_BT)
    before_label_BT[:, :-1] = batch.loss_mask_BT[:, 1:]
    return before_label_BT


def shifted_left(values_BT: Tensor, by: int) -> Tensor:
    """Return values `[B, T, ...]` moved `by` places to the left, the last one repeated where nothing is left."""
    if by == 0:
        return values_BT
    by = min(by, values_BT.shape[1])
    return torch.cat([values_BT[:, by:], values_BT[:, -1:].expand(-1, by, *values_BT.shape[2:])], 1)


def flat(values_BT: Tensor, places_N: Tensor) -> Tensor:
    """Return the rows `[N, ...]` of `[B, T, ...]` values at flat places b * T + t, which may lie in host memory."""
    return values_BT.flatten(0, 1)[upload(places_N, values_BT.device)]

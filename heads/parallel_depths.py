"""Which elements a head that says all depths in one forward is made of in training, and what each of them attends to.

An element speaks for an origin j at a depth d. Those of depth 0, one at every position, are made of the target's states; each
sees those before it in its document. The further ones, of depths 1, 2, ..., see the depth-0 elements of origins up to j, and of
the further ones only those of their own origin up to their own depth: a chain. Fewer and fewer origins are kept as depth grows
("conditional on drop", P-EAGLE), each subset drawn from the one before, so that a kept element has its whole chain.
B batch, T positions, M origins that have further elements, R depths of those, S further elements (flat, one depth after
another), N heads, G key-value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from heads.draft_layer import DraftAttention, Rotation
from heads.training import HeadInputs, labelled_origins


def kept_depths(inputs: HeadInputs, shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Draw for how many depths each origin is trained.

    Depth d is trained at random ones of the origins whose labels up to that depth are the target's own: `shares[d]` of all
    that have a label at depth 0, rounded up, less those whose text has ended. Draws use torch's global generator, and none is
    made where all shares are 1.

    Args:
        inputs: the batch.
        shares: falling, in (0, 1], one a depth; the first is 1.

    Returns:
        Number of depths by origin, int64 `[B, T]`, 0 where there is no label at all; and one over the chance that an origin
        was kept, float `[B, K]`, by row and depth.
    """
    labelled_BT = _labelled(inputs, 0)
    num_B1 = labelled_BT.sum(1, keepdim=True)
    kept_BK = (num_B1.double() * torch.tensor(shares, device=num_B1.device, dtype=torch.float64) - 1e-6).ceil()
    rank_BT = _ranks(labelled_BT) if min(shares) < 1 else torch.zeros_like(inputs.input_ids_BT)
    depths_BT = torch.zeros_like(inputs.input_ids_BT)
    for depth in range(len(shares)):
        labelled_BT = labelled_BT & _labelled(inputs, depth) & (rank_BT < kept_BK[:, depth, None])
        depths_BT += labelled_BT
    return depths_BT, (num_B1 / kept_BK.clamp(min=1)).float()


def _labelled(inputs: HeadInputs, depth: int) -> Tensor:
    """Return which origins have a label at a depth, bool `[B, T]`."""
    labelled_P = torch.zeros_like(inputs.loss_mask_BT).flatten()
    labelled_P[labelled_origins(inputs, depth)] = True
    return labelled_P.view_as(inputs.loss_mask_BT)


def _ranks(labelled_BT: Tensor) -> Tensor:
    """Return the places of labelled origins in a random order of each row's, int64 `[B, T]`; the others come after them."""
    noise_BT = torch.rand(labelled_BT.shape, device=labelled_BT.device)
    return (noise_BT + ~labelled_BT).argsort(1).argsort(1)


@dataclass(frozen=True, kw_only=True)
class Chains:
    """The further elements of a batch.

    Origins stand in falling order of how many depths they are kept for. So those of a depth are the first ones of the depth
    before, and rows of the batch that have fewer are filled up at their ends.

    Args:
        origins_BM: their positions in their rows, int64.
        depths_BM: for how many depths each is kept, depth 0 counted, int64.
        widths: how many of the M have an element at depth 1, 2, ...: as many as in the row that has most.
    """

    origins_BM: Tensor
    depths_BM: Tensor
    widths: tuple[int, ...]

    @property
    def origins_BS(self) -> Tensor:
        """The origin of each element."""
        return torch.cat([self.origins_BM[:, :0], *(self.origins_BM[:, :width] for width in self.widths)], 1)

    @property
    def depth_S(self) -> Tensor:
        """The depth of each element, from 1."""
        widths = torch.tensor(self.widths, device=self.origins_BM.device, dtype=torch.int64)
        return torch.arange(1, len(self.widths) + 1, device=widths.device).repeat_interleave(widths)

    def kept(self, depth: int) -> Tensor:
        """Return which of the elements of a depth (from 1) are trained and no filling, bool `[B, widths[depth - 1]]`."""
        return self.depths_BM[:, : self.widths[depth - 1]] > depth

    def by_chain(self, values_BNSX: Tensor) -> Tensor:
        """Return values of elements as `[B, N, M, R, X]`, 0 where a chain has ended."""
        M = max(self.widths)
        parts = values_BNSX.split(self.widths, 2)
        return torch.stack([functional.pad(part, (0, 0, 0, M - part.shape[2])) for part in parts], 3)

    def flat(self, values_BNMRX: Tensor) -> Tensor:
        """Return values by chain as `[B, N, S, X]`."""
        return torch.cat([values_BNMRX[:, :, :width, number] for number, width in enumerate(self.widths)], 2)


def make_chains(depths_BT: Tensor, num_depths: int) -> Chains:
    """Return the further elements of origins that are kept for so many depths."""
    further = torch.arange(1, num_depths, device=depths_BT.device)
    widths = (depths_BT.unsqueeze(-1) > further).sum(1).amax(0).tolist()
    origins_BM = depths_BT.argsort(dim=1, descending=True, stable=True)[:, : max(widths, default=0)]
    return Chains(origins_BM=origins_BM, depths_BM=depths_BT.gather(1, origins_BM), widths=tuple(widths))


class ParallelKeys:
    """The attention of one layer over the depth-0 elements of T positions and the further ones after them.

    Args:
        visible_B1TT: which depth-0 elements each of them sees (`heads.draft_layer.causal_mask`).
        chains: the further elements.
    """

    def __init__(self, visible_B1TT: Tensor, chains: Chains) -> None:
        self.visible_B1TT, self.chains = visible_B1TT, chains
        T = visible_B1TT.shape[-1]
        rows_BST = chains.origins_BS.unsqueeze(-1).expand(-1, -1, T)
        self.visible_B1ST = visible_B1TT.squeeze(1).gather(1, rows_BST).unsqueeze(1)

    def attend(self, attention: DraftAttention, states_BUX: Tensor, rotation: Rotation) -> Tensor:
        """Return the attention output `[B, T + S, D]` of all elements."""
        T, S = self.visible_B1TT.shape[-1], self.visible_B1ST.shape[2]
        k_BGUH, v_BGUH = attention.keys_values(states_BUX, rotation)
        q_BNUH = attention.queries(states_BUX, rotation)
        read_BTD = attention.attend(q_BNUH[:, :, :T], k_BGUH[:, :, :T], v_BGUH[:, :, :T], self.visible_B1TT)
        if S == 0:
            return read_BTD
        groups = q_BNUH.shape[1] // k_BGUH.shape[1]
        k_BNUH, v_BNUH = (values.repeat_interleave(groups, 1) for values in (k_BGUH, v_BGUH))
        mixed_BNSH = self._mix(q_BNUH[:, :, T:], *k_BNUH.split([T, S], 2), *v_BNUH.split([T, S], 2))
        return torch.cat([read_BTD, attention.output(mixed_BNSH)], 1)

    def _mix(self, q_BNSH: Tensor, k_BNTH: Tensor, k_BNSH: Tensor, v_BNTH: Tensor, v_BNSH: Tensor) -> Tensor:
        """Return the values mixed for the further elements, in one softmax over what they read and their own chains."""
        chains, R, T = self.chains, len(self.chains.widths), k_BNTH.shape[2]
        scale = q_BNSH.shape[-1] ** -0.5
        block_BNST = (q_BNSH @ k_BNTH.transpose(2, 3)).float() * scale
        block_BNST = block_BNST.masked_fill(~self.visible_B1ST, float("-inf"))
        own_BNMRR = (chains.by_chain(q_BNSH) @ chains.by_chain(k_BNSH).transpose(3, 4)).float() * scale
        later_RR = torch.ones(R, R, dtype=torch.bool, device=own_BNMRR.device).triu(1)
        own_BNSR = chains.flat(own_BNMRR.masked_fill(later_RR, float("-inf")))
        weights = torch.cat([block_BNST, own_BNSR], -1).softmax(-1).to(v_BNTH.dtype)
        own_BNSH = chains.flat(chains.by_chain(weights[..., T:]) @ chains.by_chain(v_BNSH))
        return weights[..., :T] @ v_BNTH + own_BNSH

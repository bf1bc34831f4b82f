"""P-EAGLE: EAGLE-3's layers, which predict all depths in one forward instead of one after another.

An *element* stands for an origin j at a depth d. Depth 0 is EAGLE-3's: the feature of position j and the embedding of x_{j+1}.
A further element stands at position j + d and is made of the embedding of a mask token and, in place of the taps, a learned
vector (`mask_hidden`) through the same projection. Elements of depth 0 see those before them in their document; a further one
sees the depth-0 elements of origins up to j, and the elements of its own origin up to its depth.

In training fewer origins are kept as depth grows ("conditional on drop"), each subset drawn from the one before, so that a kept
element has its whole chain. A kept origin weighs as many as it stands for, which makes the loss an unbiased estimate of the one
over all origins. Tensor names are those that serving engines read.
B batch, T positions, S further elements (a depth after another), U = T + S, A taps, F = A * E, D width, N heads, M key-value
heads, G drafts, H head width, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.schema.heads import PEagleSettings
from heads.device import upload
from heads.families.eagle3 import EagleBody, mask_token
from heads.frozen.hidden_states import TargetStates
from heads.modules.attention import Ranges, causal_ranges, read_ranges, with_diagonals
from heads.modules.autoregressive import FeatureProposer
from heads.modules.interface import Batch, Depth, Family, flat, labelled_origins, shifted_left
from heads.modules.layers import DraftAttention, LayerKeys, Rotation
from heads.proposers.builders import ChainBuilder
from heads.proposers.protocol import RoundInputs
from heads.vocabulary import DraftVocabulary


class PEagle(EagleBody):
    """A P-EAGLE head on a frozen target (`heads.modules.output_head.HeadModule`)."""

    settings: PEagleSettings

    def __init__(self, settings: PEagleSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(settings, target, vocabulary)
        self.mask_token_id = mask_token(settings.mask_token_id, target)
        self.settings = settings.model_copy(update={"taps": list(self.taps), "mask_token_id": self.mask_token_id})
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features) * 0.02)

    def forward(self, batch: Batch, states: TargetStates) -> list[Depth]:
        """Run the head over all depths of the origins that are kept; in evaluation mode that is all of them."""
        settings, num_depths = self.settings, self.settings.num_depths
        shares = [max(settings.keep_share**depth, settings.min_keep_share) for depth in range(num_depths)]
        depths_BT, row_weights_BK = kept_depths(batch, shares if self.training else [1.0] * num_depths)
        widths = (depths_BT.unsqueeze(-1) > torch.arange(1, num_depths)).sum(1).amax(0).tolist()
        order_BT = depths_BT.argsort(dim=1, descending=True, stable=True)  # on the host, as all places here
        origins_BS = torch.cat([order_BT[:, :width] for width in (0, *widths)], 1)
        origins_BS = upload(origins_BS, batch.input_ids_BT.device)
        mask_ids_BS = torch.full_like(origins_BS, self.mask_token_id)
        embedded_BUD = self.embed(torch.cat([shifted_left(batch.input_ids_BT, 1), mask_ids_BS], 1))
        mask_BSD = self.fuse(self.mask_hidden).expand(*origins_BS.shape, -1)
        states_BUD = torch.cat([self.features(states), mask_BSD], 1)
        depth_S = torch.arange(1, num_depths).repeat_interleave(torch.tensor(widths, dtype=torch.int64))
        ahead_BS = batch.position_ids_BT.gather(1, origins_BS) + upload(depth_S, origins_BS.device)
        rotation = self.rotary(embedded_BUD, torch.cat([batch.position_ids_BT, ahead_BS], 1))
        keys = ParallelKeys(causal_ranges(batch.position_ids_BT), origins_BS, widths)
        for layer in self.layers:
            states_BUD = layer(embedded_BUD, states_BUD, rotation, keys)
        T, rank_P = batch.input_ids_BT.shape[1], order_BT.argsort(1).flatten()
        depths = []
        for depth, part_BXD in enumerate((states_BUD[:, :T], *states_BUD[:, T:].split(widths, 1))):
            origins_N = (depths_BT > depth).flatten().nonzero().squeeze(1)
            rows_N, columns_N = origins_N // T, rank_P[origins_N] if depth else origins_N % T
            states_ND = flat(part_BXD, rows_N * part_BXD.shape[1] + columns_N)
            row_weights_N = upload(row_weights_BK[rows_N, depth], states_ND.device)
            depths.append(self.at_depth(depth, self.norm(states_ND), origins_N, row_weights_N=row_weights_N))
        return depths


class ParallelDrafts(FeatureProposer):
    """P-EAGLE as a proposer (`heads.proposers.protocol.Proposer`): one forward, at most as many drafts as depths trained.

    A round's forward reads the positions that the target has read since the last one, and after each row's last of them the
    elements of the further depths. The keys of these are written over in the next round, by positions that were read.
    """

    module: PEagle

    def __init__(self, module: PEagle, device: torch.device) -> None:
        # Rows that read less than others are filled up at the end, which takes room beyond the last position.
        super().__init__(module, device, beyond=module.settings.num_depths)

    def draft(self, inputs: RoundInputs, chain: ChainBuilder, num_tokens: int) -> None:
        module, pending = self.module, self._pending.read(inputs)
        ids_BT = functional.pad(pending.next_BT, (0, num_tokens - 1))
        features_BTF = functional.pad(pending.features_BTF, (0, 0, 0, num_tokens - 1))
        columns_T = torch.arange(ids_BT.shape[1], device=self.device)
        is_mask_BT = columns_T > pending.last_B.unsqueeze(1)
        features_BTF = torch.where(is_mask_BT.unsqueeze(-1), module.fuse(module.mask_hidden), features_BTF)
        ids_BT = ids_BT.masked_fill(is_mask_BT, module.mask_token_id)
        positions_BT = self._place(pending.first, len(columns_T))
        states_BTD = module.run_cached(features_BTF, ids_BT, positions_BT, self._cache)
        drafted_BG = pending.last_B.unsqueeze(1) + torch.arange(num_tokens, device=self.device)
        states_BGD = states_BTD[torch.arange(len(inputs.tokens), device=self.device).unsqueeze(1), drafted_BG]
        for logits_BW in module.lm_head.logits(module.norm(states_BGD)).unbind(1):
            chain.add(logits_BW)


def kept_depths(batch: Batch, shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Draw for how many depths each origin is trained, int64 `[B, T]`; also return one over the chance of that, `[B, K]`.

    Depth d is trained at random ones of the origins whose labels up to that depth are the target's own: `shares[d]`, falling
    from 1, of all that have a label at depth 0, rounded up, less those whose text has ended. Both results lie in host memory.
    """
    batch = batch.on_host
    labelled_BT = _labelled(batch, 0)
    num_B1 = labelled_BT.sum(1, keepdim=True)
    kept_BK = (num_B1.double() * torch.tensor(shares, dtype=torch.float64) - 1e-6).ceil()
    rank_BT = torch.zeros_like(batch.input_ids_BT)
    if min(shares) < 1:  # places in a random order of each row's labelled origins; the others come after them
        rank_BT = (torch.rand(labelled_BT.shape) + ~labelled_BT).argsort(1).argsort(1)
    depths_BT = torch.zeros_like(batch.input_ids_BT)
    for depth in range(len(shares)):
        labelled_BT = labelled_BT & _labelled(batch, depth) & (rank_BT < kept_BK[:, depth, None])
        depths_BT += labelled_BT
    return depths_BT, (num_B1 / kept_BK.clamp(min=1)).float()


def _labelled(batch: Batch, depth: int) -> Tensor:
    labelled_P = torch.zeros_like(batch.loss_mask_BT).flatten()
    labelled_P[labelled_origins(batch, depth)] = True
    return labelled_P.view_as(batch.loss_mask_BT)


class ParallelKeys(LayerKeys):
    """The attention of one layer over the depth-0 elements of T positions and the further ones after them.

    These are those of `origins_BS`, a depth after another; of each depth the first `widths[d]` of those of the depth before.
    """

    def __init__(self, ranges: Ranges, origins_BS: Tensor, widths: Sequence[int]) -> None:
        self.ranges, self.further, self.widths = ranges, ranges.of(origins_BS), widths

    def attend(self, attention: DraftAttention, states_BUX: Tensor, rotation: Rotation) -> Tensor:
        T = self.ranges.first_BX.shape[1]
        k_BMUH, v_BMUH = attention.keys_values(states_BUX, rotation)
        q_BNUH = attention.queries(states_BUX, rotation)
        row = k_BMUH[:, :, :T], v_BMUH[:, :, :T]
        mixed_BNUH, _ = read_ranges(q_BNUH[:, :, :T], *row, self.ranges)
        if q_BNUH.shape[2] > T:
            q_BNSH = q_BNUH[:, :, T:]
            read = self._by_depth(q_BNSH, *read_ranges(q_BNSH, *row, self.further))
            chains = self._by_depth(k_BMUH[:, :, T:], v_BMUH[:, :, T:])
            further = [
                with_diagonals(q, mixed, log_sum, [(k[:, :, :width], v[:, :, :width]) for k, v in chains[: depth + 1]])
                for depth, (width, (q, mixed, log_sum)) in enumerate(zip(self.widths, read, strict=True))
            ]
            mixed_BNUH = torch.cat([mixed_BNUH, *further], 2)
        return attention.output(mixed_BNUH)

    def _by_depth(self, *values_BNS: Tensor) -> list[tuple[Tensor, ...]]:
        return list(zip(*(each.split(self.widths, 2) for each in values_BNS), strict=True))


FAMILY = Family(settings=PEagleSettings, build=PEagle, propose=ParallelDrafts)

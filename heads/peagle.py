"""P-EAGLE: EAGLE-3's layers, which say all depths in one forward instead of one after another.

Depth 0 is EAGLE-3's: the feature of position j and the embedding of x_{j+1}. At a further depth d the element of origin j
stands at position j + d and is made of what does not depend on the text: the embedding of a mask token, and a learned vector
in place of the taps (`mask_hidden`), through the same projection. What sees what: `heads.parallel_depths`. In training the
further depths are trained at a share of the origins only; here a kept origin weighs as many as it stands for, so that the loss
is an unbiased estimate of the one over all of them, and `depth_decay` alone says what a depth is worth. Names of the tensors
are those that serving engines know. Departure: the embedding is the target's, and stays so.
B batch, T positions, S further elements, U = T + S, A taps, F = A * E, D width, G drafts, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.decoding import SamplingConfig
from configs.head_families import PEagleSettings
from heads.draft_layer import causal_mask, placed_mask
from heads.draft_vocabulary import DraftVocabulary
from heads.drafting import Drafting
from heads.eagle3 import CachedKeys, EagleBody
from heads.kv_cache import RowCache
from heads.mask_token import mask_token
from heads.parallel_depths import Chains, ParallelKeys, kept_depths, make_chains
from heads.proposer import Proposal, Proposer, Tokens
from heads.streams import Streams
from heads.tap_noise import with_noise
from heads.target_states import TargetStates
from heads.training import Depth, HeadInputs, flat, shifted_left
from heads.unread import Unread


class PEagle(EagleBody):
    """A P-EAGLE head on a frozen target (`heads.training.HeadModule`)."""

    def __init__(self, settings: PEagleSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(settings, target, vocabulary)
        self.mask_token_id = mask_token(settings.mask_token_id, target)
        self.settings = settings.model_copy(update={"taps": list(self.taps), "mask_token_id": self.mask_token_id})
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features) * 0.02)

    def forward(self, inputs: HeadInputs) -> list[Depth]:
        """Run the head over all depths of the origins that are kept; in evaluation mode that is all of them."""
        num_depths = self.settings.num_depths
        depths_BT, row_weights_BK = kept_depths(inputs, self._shares() if self.training else [1.0] * num_depths)
        chains = make_chains(depths_BT, num_depths)
        states_BUD = self._states(inputs, chains)
        T = inputs.input_ids_BT.shape[1]
        rows_B1 = torch.arange(len(depths_BT), device=depths_BT.device).unsqueeze(1)
        places_BM = rows_B1 * T + chains.origins_BM
        origins_N = (depths_BT > 0).flatten().nonzero().squeeze(1)
        depths = [self._depth(flat(states_BUD[:, :T], origins_N), origins_N, row_weights_BK[:, 0], 0, T)]
        parts = states_BUD[:, T:].split(chains.widths, 1)
        for depth, part_BMD in enumerate(parts, start=1):
            kept_BM = chains.kept(depth)
            origins_N, order_N = places_BM[:, : kept_BM.shape[1]][kept_BM].sort()
            depths.append(self._depth(part_BMD[kept_BM][order_N], origins_N, row_weights_BK[:, depth], depth, T))
        return depths

    def read(self, features_BTF: Tensor, ids_BT: Tensor, positions_BT: Tensor, cache: RowCache) -> Tensor:
        """Return the states `[B, T, D]` at placed positions; the mask's features and ids stand in for what is not known."""
        embedded_BTD = self.embed(ids_BT)
        rotation = self.rotary(embedded_BTD, positions_BT)
        visible_B1TS = placed_mask(cache, positions_BT)
        states_BTD = features_BTF
        for number, layer in enumerate(self.layers):
            states_BTD = layer(embedded_BTD, states_BTD, rotation, CachedKeys(cache, number, visible_B1TS))
        return states_BTD

    def _states(self, inputs: HeadInputs, chains: Chains) -> Tensor:
        """Return the states `[B, T + S, D]` of all elements after the last layer."""
        origins_BS = chains.origins_BS
        mask_ids_BS = torch.full_like(origins_BS, self.mask_token_id)
        embedded_BUD = self.embed(torch.cat([shifted_left(inputs.input_ids_BT, 1), mask_ids_BS], 1))
        mask_BSD = self.fuse(self.mask_hidden).expand(*origins_BS.shape, -1)
        noise = self.settings.tap_noise if self.training else 0.0
        states_BUD = torch.cat([self.features(with_noise(inputs.states, noise)), mask_BSD], 1)
        ahead_BS = inputs.position_ids_BT.gather(1, origins_BS) + chains.depth_S
        rotation = self.rotary(embedded_BUD, torch.cat([inputs.position_ids_BT, ahead_BS], 1))
        keys = ParallelKeys(causal_mask(inputs.document_ids_BT), chains)
        for layer in self.layers:
            states_BUD = layer(embedded_BUD, states_BUD, rotation, keys)
        return states_BUD

    def _depth(self, states_ND: Tensor, origins_N: Tensor, row_weights_B: Tensor, depth: int, T: int) -> Depth:
        weight, row_weights_N = self.settings.depth_decay**depth, row_weights_B[origins_N // T]
        return self.lm_head.at_depth(depth, self.norm(states_ND), origins_N, weight=weight, row_weights_N=row_weights_N)

    def _shares(self) -> list[float]:
        settings = self.settings
        shares = (max(settings.keep_share**depth, settings.min_keep_share) for depth in range(settings.num_depths))
        return list(shares)


class ParallelDrafts:
    """P-EAGLE as a proposer (`heads.proposer.Proposer`): one forward a round; at most as many drafts as depths were trained.

    A round's forward reads the positions that the target has read since the last one, and after each row's last of them the
    elements of the further depths. The keys of these are written over in the next round, by positions that were read.
    """

    def __init__(self, module: PEagle, device: torch.device) -> None:
        self.module, self.device = module, device
        self.taps = module.taps
        self._cache: RowCache
        self._unread: Unread

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        # Rows that read less than others are filled up at the end, which takes room beyond the last position.
        self._cache = RowCache(self.module.num_caches, capacity + self.module.settings.num_depths)
        self._unread = Unread(self.module.features(states), [len(row) - 1 for row in tokens])

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, streams: Streams, *, keep_logits: bool
    ) -> Proposal:
        head, lengths = self.module.lm_head, [len(row) for row in tokens]
        drafting = Drafting(lengths, sampling, streams, self.device, head.target_ids, head.spread, keep_logits=keep_logits)
        states_BGD = self._read(tokens, min(num_tokens, self.module.settings.num_depths))
        for logits_BW in head.logits(self.module.norm(states_BGD)).unbind(1):
            drafting.add(logits_BW)
        return drafting.proposal()

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        self._unread.replace(self.module.features(states), [accepted + 1 for accepted in num_accepted])

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._cache.keep_rows(rows)
        self._unread.keep_rows(rows)

    def _read(self, tokens: Tokens, num_drafts: int) -> Tensor:
        """Return the states `[B, G, D]` of each row's last position that was read and of the further depths there."""
        module, unread = self.module, self._unread
        ids_BT = functional.pad(unread.next_tokens(tokens), (0, num_drafts - 1))
        features_BTF = functional.pad(unread.features_BTF, (0, 0, 0, num_drafts - 1))
        columns_T = torch.arange(ids_BT.shape[1], device=self.device)
        is_mask_BT = columns_T > unread.last_B.unsqueeze(1)
        features_BTF = torch.where(is_mask_BT.unsqueeze(-1), module.fuse(module.mask_hidden), features_BTF)
        ids_BT = ids_BT.masked_fill(is_mask_BT, module.mask_token_id)
        self._cache.place(unread.first, len(columns_T), self.device)
        positions_BT = torch.tensor(unread.first, device=self.device).unsqueeze(1) + columns_T
        states_BTD = module.read(features_BTF, ids_BT, positions_BT, self._cache)
        drafted_BG = unread.last_B.unsqueeze(1) + torch.arange(num_drafts, device=self.device)
        return states_BTD[torch.arange(len(tokens), device=self.device).unsqueeze(1), drafted_BG]


def make_proposer(module: PEagle, device: torch.device) -> Proposer:
    """Return the decoding side."""
    return ParallelDrafts(module, device)

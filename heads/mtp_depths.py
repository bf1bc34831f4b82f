"""The decoding side of MTP with a module for each depth.

At index i the module of depth k reads the state that the module before it gave there (depth 0: the target's) and the token
x_{i+1+k}. After a round the target's states reach j, and the module of depth k has read tokens up to x_{j+1+k}, of which only
those up to x_{j+1} are sure. So the last indices of every module but the first may rest on drafts that were rejected. Like
transformers' `MtpCache`, each round reads again as many indices as there are drafts under way, in the same forward as the
new ones. B batch, T indices of a window, F width of a feature, D width of a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from configs.decoding import SamplingConfig
from heads.drafting import Drafting
from heads.feature_chain import ChainModule
from heads.kv_cache import RowCache
from heads.proposer import Proposal, Tokens
from heads.streams import Streams
from heads.target_states import TargetStates
from heads.unread import Unread


class DepthChain:
    """Modules of one depth each as a proposer (`heads.proposer.Proposer`); drafts at most one token a module.

    Once a round has asked for fewer tokens, later ones of the same batch get no more than that: the deeper modules have not
    read along, and what they missed is not kept. So where a rule stops a round (`heads.stopping`), all modules still read, and
    what is saved is the target's rows alone.
    """

    def __init__(self, module: ChainModule, device: torch.device) -> None:
        self.module, self.device = module, device
        self.taps = module.taps
        self._cache: RowCache
        self._window: Unread
        self._num_depths = module.num_caches

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self._cache = RowCache(self.module.num_caches, capacity)
        self._num_depths = self.module.num_caches
        self._window = Unread(self.module.features(states), [len(row) - 1 for row in tokens])

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, streams: Streams, *, keep_logits: bool
    ) -> Proposal:
        head, window = self.module.lm_head, self._window
        self._num_depths = min(self._num_depths, num_tokens)
        lengths = [len(row) for row in tokens]
        drafting = Drafting(lengths, sampling, streams, self.device, head.target_ids, head.spread, keep_logits=keep_logits)
        states_BTD, known_BT = window.features_BTF, window.next_tokens(tokens)
        B, T = known_BT.shape
        # Row b's window of depth k starts at column k; its k drafts follow its last known token.
        ids_BX = torch.cat([known_BT, known_BT.new_zeros(B, self._num_depths)], 1)
        rows_B, last_B = torch.arange(B, device=self.device), window.last_B
        positions_BT = torch.tensor(window.first, device=self.device).unsqueeze(1) + torch.arange(T, device=self.device)
        self._cache.place(window.first, T, self.device)
        for depth in range(self._num_depths):
            states_BTD = self.module.read(states_BTD, ids_BX[:, depth : depth + T], positions_BT, self._cache, depth)
            state_BD = self.module.to_head(states_BTD[rows_B, last_B], depth)
            ids_BX[rows_B, last_B + 1 + depth] = drafting.add(head.logits(state_BD))
        return drafting.proposal()

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        """Move the window on: the last indices that may rest on rejected drafts, then those the target has just read."""
        old, new_BTF = self._window, self.module.features(states)
        kept = [min(self._num_depths - 1, count) for count in old.counts]
        counts = [before + accepted + 1 for before, accepted in zip(kept, num_accepted, strict=True)]
        both_BSF = torch.cat([old.features_BTF, new_BTF], 1)
        start_of_new = old.features_BTF.shape[1]
        columns = [
            [*range(count - before, count), *range(start_of_new, start_of_new + accepted + 1)]
            for count, before, accepted in zip(old.counts, kept, num_accepted, strict=True)
        ]
        index_BT = torch.tensor([row + [0] * (max(counts) - len(row)) for row in columns], device=self.device)
        rows_B1 = torch.arange(len(counts), device=self.device).unsqueeze(1)
        self._window = Unread(both_BSF[rows_B1, index_BT], counts)
        self._window.first = [end - before for end, before in zip(old.ends, kept, strict=True)]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._cache.keep_rows(rows)
        self._window.keep_rows(rows)

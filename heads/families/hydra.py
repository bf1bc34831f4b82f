"""Hydra: Medusa's heads made to read the tokens drafted before them.

Ankner et al. 2024, arXiv 2402.05109. The head of depth k reads the target's final state of position j, after its final norm,
and the embeddings of x_{j+1} to x_{j+1+k}: the text's own in training, the pending and the drafted ones when decoding. Its
first block narrows that to the target's width, by R z + SiLU(W z), then come residual blocks as Medusa's. Hydra++ leads the
final states through one decoder layer first ("prefix attention"), so that a head knows more of the text than its last state.

Departures: W starts at 0 and R as a copy of the state, so that an untrained head gives the target's distribution of x_{j+1};
embeddings are normed, since many targets' are small beside their states, and W would learn from them slowly; blocks never share
weights; no norm follows the prefix layer, whose output the target's own head can then read; one output head serves all depths.
Left out: dropout.
B batch, T positions, N rows of one depth, E width of the target, K depths, F width of what a head reads.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.schema.heads import HydraSettings
from heads.families.medusa import ResidualBlocks
from heads.frozen.hidden_states import TargetStates
from heads.inference.kv_cache import RowCache
from heads.modules.attention import CachedKeys, RowKeys, causal_ranges, visible_slots
from heads.modules.autoregressive import ChainHead, FeatureChain
from heads.modules.interface import Batch, Depth, Family, flat, labelled_origins
from heads.modules.layers import DraftLayer, HeadLayer, Rotary, layer_shape, norm
from heads.modules.output_head import DraftHead
from heads.vocabulary import DraftVocabulary


class Hydra(ChainHead):
    """Hydra heads on a frozen target; the chain's state is what a head reads, longer by an embedding for each drafted token."""

    settings: HydraSettings

    def __init__(self, settings: HydraSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(target)
        self.settings = settings
        self.num_caches = int(settings.prefix_attention)
        shape = layer_shape(target, settings.layer)
        self.rotary = Rotary(shape)
        self.prefix_layer = DraftLayer(shape) if settings.prefix_attention else None
        self.embedding_norm = norm(shape) if settings.norm_embeddings else nn.Identity()
        self.blocks = nn.ModuleList(
            GroundedBlocks(shape.width, depth + 2, settings.num_layers) for depth in range(settings.num_depths)
        )
        self.lm_head = DraftHead(target, vocabulary, trainable=settings.train_head)

    def forward(self, batch: Batch, states: TargetStates) -> list[Depth]:
        states_BTE = self.features(states)
        if self.prefix_layer is not None:
            ranges = causal_ranges(batch.position_ids_BT, self.settings.window)
            states_BTE = self.prefix_layer(states_BTE, self.rotary(states_BTE, batch.position_ids_BT), RowKeys(ranges))
        embedded_BTE = self.embedding_norm(self.embed(batch.input_ids_BT))
        depths = []
        for depth, blocks in enumerate(self.blocks):
            origins_N = labelled_origins(batch, depth)
            known = [flat(embedded_BTE, origins_N + 1 + ahead) for ahead in range(depth + 1)]
            hidden_ND = blocks(torch.cat([flat(states_BTE, origins_N), *known], -1))
            depths.append(self.at_depth(depth, hidden_ND, origins_N))
        return depths

    def read(self, features_BTF: Tensor, ids_BT: Tensor, positions_BT: Tensor, cache: RowCache, depth: int) -> Tensor:
        """See `ChainHead.read`; the states are what the head of this depth reads."""
        if depth == 0 and self.prefix_layer is not None:
            window = self.settings.window
            keys = CachedKeys(cache, 0, visible_slots(cache, positions_BT, window), window)
            features_BTF = self.prefix_layer(features_BTF, self.rotary.drafting(positions_BT), keys)
        return torch.cat([features_BTF, self.embedding_norm(self.embed(ids_BT))], -1)

    def to_head(self, states_BD: Tensor, depth: int) -> Tensor:
        return cast(Tensor, self.blocks[depth](states_BD))


class GroundedBlocks(HeadLayer):
    """R z + SiLU(W z + b) of `num_parts` side by side, a state and embeddings, then residual blocks."""

    def __init__(self, width: int, num_parts: int, num_layers: int) -> None:
        super().__init__()
        self.res_connection = nn.Linear(num_parts * width, width)
        self.linear = nn.Linear(num_parts * width, width)
        self.blocks = ResidualBlocks(width, num_layers)
        for parameter in (*self.res_connection.parameters(), *self.linear.parameters()):
            nn.init.zeros_(parameter)
        nn.init.eye_(self.res_connection.weight)  # ones on the diagonal: the state, which comes first

    def forward(self, read_NF: Tensor) -> Tensor:
        """Return states `[..., E]` of what the head reads, `[..., num_parts * E]`."""
        return cast(Tensor, self.blocks(self.res_connection(read_NF) + functional.silu(self.linear(read_NF))))


FAMILY = Family(settings=HydraSettings, build=Hydra, propose=FeatureChain)

"""Medusa and Hydra: heads on the target's final state, one for each future token.

Medusa (Cai et al. 2024, arXiv 2401.10774): the state of position j, after the target's final norm, goes through blocks x +
SiLU(W x + b) of each depth and then through an output head; no head reads a token. Departure: every block has weights of its
own.

Hydra (Ankner et al. 2024, arXiv 2402.05109): the head of depth k also reads the embeddings of x_{j+1} to x_{j+1+k}, the text's
own in training, the pending and the drafted ones when decoding. Its first block narrows all that to the target's width, by R z
+ SiLU(W z). Hydra++ leads the final states through one decoder layer first ("prefix attention"). Departures: R starts as a copy
of the state; embeddings are normed, since many targets' are small beside their states; no norm follows the prefix layer, whose
output the target's own head can then read; one output head serves all depths. Left out: dropout.

W and b start at 0, so an untrained head repeats the target's distribution of x_{j+1}. Medusa's tensor names are those of vLLM.
B batch, T positions, N rows of one depth, E width of the target, K depths, F width of what a head reads, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.schema.decoding import SamplingConfig
from configs.schema.heads import HydraSettings, MedusaSettings
from heads.frozen.hidden_states import TargetStates
from heads.inference.kv_cache import RowCache
from heads.modules.attention import CachedKeys, RowKeys, causal_ranges, visible_slots
from heads.modules.autoregressive import ChainHead, FeatureChain, FeatureProposer
from heads.modules.interface import Batch, Depth, Family, flat, labelled_origins
from heads.modules.layers import DraftLayer, HeadLayer, Rotary, layer_shape, norm
from heads.modules.output_head import DraftHead, HeadModule
from heads.proposers.builders import ChainBuilder
from heads.proposers.protocol import Proposal, RoundInputs
from heads.sampling.token_tree import DynamicTreeSpec, Tree
from heads.vocabulary import DraftVocabulary


class Medusa(HeadModule):
    """Medusa heads on a frozen target (`heads.modules.output_head.HeadModule`); depth k predicts x_{j+2+k}."""

    settings: MedusaSettings

    def __init__(self, settings: MedusaSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(target)
        self.settings = settings
        width = target.config.get_text_config().hidden_size
        self.blocks = nn.ModuleList(ResidualBlocks(width, settings.num_layers) for _ in range(settings.num_depths))
        heads = (DraftHead(target, vocabulary, trainable=settings.train_head) for _ in range(settings.num_depths))
        if settings.own_output_heads:
            self.lm_heads = nn.ModuleList(heads)
        else:
            self.lm_head = next(heads)

    def forward(self, batch: Batch, states: TargetStates) -> list[Depth]:
        depths = []
        for depth, blocks in enumerate(self.blocks):
            origins_N = labelled_origins(batch, depth)
            depths.append(self.at_depth(depth, blocks(flat(states.final_BTE, origins_N)), origins_N))
        return depths

    def output_head(self, depth: int) -> DraftHead:
        return cast(DraftHead, self.lm_heads[depth]) if self.settings.own_output_heads else self.lm_head

    def draft_logits(self, final_BE: Tensor, num_depths: int) -> Sequence[Tensor]:
        """Return the logits `[B, W]` of the first depths, from the target's final state at the origin."""
        states = [blocks(final_BE) for blocks in self.blocks[:num_depths]]
        if self.settings.own_output_heads:
            return [self.output_head(depth).logits(state_BE) for depth, state_BE in enumerate(states)]
        return self.lm_head.logits(torch.stack(states, 1)).unbind(1)  # in one product: weights are fetched once a round


class ResidualBlocks(HeadLayer):
    """Blocks x + SiLU(W x + b) one after another, the identity before training."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, states: Tensor) -> Tensor:
        """Return states `[..., E]` of the same shape, in the dtype of the weights."""
        states = states.to(cast(nn.Linear, self.layers[0]).weight.dtype)
        for layer in self.layers:
            states = states + functional.silu(layer(states))
        return states


class MedusaDrafts(FeatureProposer):
    """Medusa heads as a proposer (`heads.proposers.protocol.TreeProposer`), which read the last pending feature alone."""

    num_trees = 1
    module: Medusa

    def draft(self, inputs: RoundInputs, chain: ChainBuilder, num_tokens: int) -> None:
        for logits_BW in self._logits(inputs, num_tokens):
            chain.add(logits_BW)

    def propose_tree(self, inputs: RoundInputs, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None) -> Proposal:
        builder = self.start_tree(inputs, tree, drawn_by)
        for logits_BW in self._logits(inputs, builder.tree.depth):
            builder.add(logits_BW.unsqueeze(1))  # a head's distribution is the same whatever was drafted before
        return builder.proposal()

    def _logits(self, inputs: RoundInputs, num_tokens: int) -> Sequence[Tensor]:
        window = self._pending.read(inputs)
        return self.module.draft_logits(window.last(window.features_BTF), num_tokens)


MEDUSA = Family(settings=MedusaSettings, build=Medusa, propose=MedusaDrafts)


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


HYDRA = Family(settings=HydraSettings, build=Hydra, propose=FeatureChain)

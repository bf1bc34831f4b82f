"""Medusa: independent residual heads on the target's final state, one for each future token.

Cai et al. 2024, arXiv 2401.10774. The state of position j, after the target's final norm, goes through one or more blocks x +
SiLU(W x + b) for each depth and then through an output head. W and b start at 0, so an untrained head repeats the target's
distribution of x_{j+1}. No head reads a drafted token, nor the pending one. Names of the tensors are those that vLLM knows.

Departure: every block has weights of its own; the published code repeats one block where a head has several.
B batch, T positions, N rows of one depth, E width of the target, K depths, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.schema.decoding import SamplingConfig
from configs.schema.heads import MedusaSettings
from heads.frozen.hidden_states import TargetStates
from heads.modules.autoregressive import FeatureProposer
from heads.modules.interface import Batch, Depth, Family, flat, labelled_origins
from heads.modules.layers import HeadLayer
from heads.modules.output_head import DraftHead, HeadModule
from heads.proposers.chain_builder import ChainBuilder
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


FAMILY = Family(settings=MedusaSettings, build=Medusa, propose=MedusaDrafts, in_one_forward=True)

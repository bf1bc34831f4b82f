"""Hydra: Medusa's heads made to read the tokens drafted before them.

Ankner et al. 2024, arXiv 2402.05109. The head of depth k reads the target's final state of position j, after its final norm,
beside the embeddings of x_{j+1} to x_{j+1+k}: the text's own in training, the pending and the drafted ones when decoding. Its
first block narrows that to the target's width, by R z + SiLU(W z), then come residual blocks as Medusa's. Hydra++ leads the
final states through one decoder layer first ("prefix attention"), so that a head knows more of the text than its last state.

Departures: W starts at 0 and R as a copy of the state, so that an untrained head gives the target's distribution of x_{j+1},
as Medusa's does; blocks never share weights; no norm follows the prefix layer, whose output the target's own head can then
read; one output head serves all depths. The published heads have such a norm, and an output head for each depth, which
outweigh everything else; `prefix_norm` and `own_output_heads` are there for those. Left out on purpose: dropout.
B batch, T positions, N rows of one depth, E width of the target, K depths, F width of what a head reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.schema.decoding import SamplingConfig
from configs.schema.heads import HydraSettings
from heads.families.medusa import ResidualBlocks
from heads.inference.kv_cache import RowCache
from heads.modules.autoregressive import FeatureChain
from heads.modules.interface import Batch, Depth, Family, flat, labelled_origins
from heads.modules.layers import (
    DraftAttention,
    DraftHead,
    LayerShape,
    Rotary,
    Rotation,
    causal_mask,
    layer_shape,
    mlp,
    norm,
    placed_mask,
)
from heads.proposers.protocol import Proposal, Tokens
from heads.proposers.vocabulary import DraftVocabulary
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.token_tree import DynamicTreeSpec, Tree
from heads.target.hidden_states import TargetStates


class Hydra(nn.Module):
    """Hydra heads on a frozen target (`heads.modules.interface.HeadModule`, `heads.modules.autoregressive.ChainModule`).

    The chain's state is what a head reads: each drafted token makes it longer by its embedding.
    """

    taps: Sequence[int] = ()

    def __init__(self, settings: HydraSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__()
        self.settings = settings
        self.num_caches = int(settings.prefix_attention)
        self._target = (target,)  # in a tuple: neither trained nor saved with the head
        shape = layer_shape(target, settings.layer)
        self.prefix_layer = PrefixLayer(shape) if settings.prefix_attention else None
        self.prefix_norm = norm(shape) if settings.prefix_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            GroundedBlocks(shape.width, depth + 2, settings.num_layers) for depth in range(settings.num_depths)
        )
        if settings.own_output_heads:
            self.lm_heads = nn.ModuleList(DraftHead(target, None, trainable=True, with_bias=True) for _ in self.blocks)
        else:
            self.lm_head = DraftHead(target, vocabulary, trainable=settings.train_head)

    @property
    def token_ids_W(self) -> Tensor | None:
        """The target's id of each draft token; None for the whole vocabulary."""
        return self.output_head(0).token_ids

    def output_head(self, depth: int) -> DraftHead:
        """Return what turns the last state of a depth into logits."""
        return cast(DraftHead, self.lm_heads[depth]) if self.settings.own_output_heads else self.lm_head

    def forward(self, batch: Batch, states: TargetStates) -> list[Depth]:
        """Run each depth's blocks at the origins it is trained on, on the text's own tokens."""
        states_BTE = self.features(states)
        if self.prefix_layer is not None:
            visible_B1TT = causal_mask(batch.document_ids_BT)
            states_BTE = self.prefix_norm(self.prefix_layer(states_BTE, batch.position_ids_BT, visible_B1TT, None))
        embedded_BTE = self._embed(batch.input_ids_BT)
        depths = []
        for depth, blocks in enumerate(self.blocks):
            origins_N = labelled_origins(batch, depth)
            known = [flat(embedded_BTE, origins_N + 1 + ahead) for ahead in range(depth + 1)]
            hidden_ND = blocks(torch.cat([flat(states_BTE, origins_N), *known], -1))
            head = self.output_head(depth)
            depths.append(head.at_depth(depth, hidden_ND, origins_N, weight=self.settings.depth_decay**depth))
        return depths

    def features(self, states: TargetStates) -> Tensor:
        """Return the target's final states in the head's dtype."""
        return states.final_BTE.to(self._dtype)

    def read(self, features_BTF: Tensor, ids_BT: Tensor, positions_BT: Tensor, cache: RowCache, depth: int) -> Tensor:
        """See `heads.modules.autoregressive.ChainModule.read`; returns what the head of this depth reads, `[B, T, (depth + 2)
        * E]`."""
        if depth == 0 and self.prefix_layer is not None:
            states_BTE = self.prefix_layer(features_BTF, positions_BT, placed_mask(cache, positions_BT), cache)
            features_BTF = self.prefix_norm(states_BTE)
        return torch.cat([features_BTF, self._embed(ids_BT)], -1)

    def to_head(self, states_BD: Tensor, depth: int) -> Tensor:
        """Return the last states of a depth's blocks, which the output head reads."""
        return cast(Tensor, self.blocks[depth](states_BD))

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.blocks.parameters()).dtype

    def _embed(self, ids_BT: Tensor) -> Tensor:
        return self._target[0].get_input_embeddings()(ids_BT).to(self._dtype)


class GroundedBlocks(nn.Module):
    """R z + SiLU(W z + b) of a state and embeddings side by side, then residual blocks
    (`heads.families.medusa.ResidualBlocks`).

    Args:
        width: of the state, of each embedding and of the result.
        num_parts: the state and so many embeddings less one.
        num_layers: residual blocks.
    """

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


class PrefixLayer(nn.Module):
    """A Llama layer over the target's final states, causal within each document."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = norm(shape)
        self.self_attn = DraftAttention(shape, shape.width)
        self.post_attention_layernorm = norm(shape)
        self.mlp = mlp(shape)
        self.rotary = Rotary(shape)

    def forward(self, states_BTE: Tensor, position_ids_BT: Tensor, visible_B1TS: Tensor, cache: RowCache | None) -> Tensor:
        """Return the states `[B, T, E]` after this layer.

        Args:
            states_BTE: final states of the target.
            position_ids_BT: where they stand in their documents.
            visible_B1TS: bool, which keys each position sees.
            cache: earlier keys and values, to which these are added; None: the states are all there is.
        """
        normed_BTE = self.input_layernorm(states_BTE)
        rotation = self.rotary(normed_BTE, position_ids_BT)
        states_BTE = states_BTE + self._attend(normed_BTE, rotation, visible_B1TS, cache)
        return states_BTE + self.mlp(self.post_attention_layernorm(states_BTE))

    def _attend(self, normed_BTE: Tensor, rotation: Rotation, visible_B1TS: Tensor, cache: RowCache | None) -> Tensor:
        keys_values = self.self_attn.keys_values(normed_BTE, rotation)
        k_BMSH, v_BMSH = keys_values if cache is None else cache.update(*keys_values, 0)
        return self.self_attn.attend(self.self_attn.queries(normed_BTE, rotation), k_BMSH, v_BMSH, visible_B1TS)


class HydraChain(FeatureChain):
    """The chain of a module that has a head for each depth: it drafts at most as many tokens as there are heads."""

    def __init__(self, module: Hydra, device: torch.device) -> None:
        super().__init__(module, device)
        self.num_depths = module.settings.num_depths
        self._heads = [module.output_head(depth) for depth in range(self.num_depths)]

    def head(self, depth: int) -> DraftHead:
        return self._heads[depth]

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, rng: CounterRNG, *, keep_logits: bool
    ) -> Proposal:
        return super().propose(tokens, min(num_tokens, self.num_depths), sampling, rng, keep_logits=keep_logits)

    def propose_tree(
        self, tokens: Tokens, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None, rng: CounterRNG
    ) -> Proposal:
        return super().propose_tree(tokens, tree.cut(self.num_depths), drawn_by, rng)


FAMILY = Family(settings=HydraSettings, build=Hydra, propose=HydraChain)

"""Medusa: independent residual heads on the target's final state, one for each future token.

Cai et al. 2024, arXiv 2401.10774. The state of position j, after the target's final norm, goes through one or more blocks x +
SiLU(W x + b) for each depth and then through an output head. W and b start at 0, so an untrained head repeats the target's
distribution of x_{j+1}. No head reads a drafted token, nor the pending one. Names of the tensors are those that vLLM knows.

Departure: every block has weights of its own; the published code repeats one block where a head has several.
B batch, T positions, N rows of one depth, E width of the target, K depths, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.schema.decoding import SamplingConfig
from configs.schema.heads import HydraSettings, MedusaSettings
from heads.frozen.hidden_states import TargetStates
from heads.modules.checkpointing import HeadLayer
from heads.modules.interface import Batch, Depth, Family, flat, labelled_origins
from heads.modules.output_head import DraftHead, HeadBase
from heads.proposers.protocol import Proposal, Tokens
from heads.proposers.tree_builder import tree_builder
from heads.proposers.vocabulary import DraftVocabulary
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.token_tree import DynamicTreeSpec, Tree
from heads.sampling.uploads import on_device, text_of


class HeadsByDepth(HeadBase):
    """A head whose depths share an output head, or have one each."""

    settings: MedusaSettings | HydraSettings

    def add_output_heads(self, make: Callable[[], DraftHead]) -> None:
        """Make the output heads under the names that engines know."""
        if self.settings.own_output_heads:
            self.lm_heads = nn.ModuleList(make() for _ in range(self.settings.num_depths))
        else:
            self.lm_head = make()

    @property
    def token_ids_W(self) -> Tensor | None:
        return self.output_head(0).token_ids

    def output_head(self, depth: int) -> DraftHead:
        """Return what turns the last state of a depth into logits."""
        return cast(DraftHead, self.lm_heads[depth]) if self.settings.own_output_heads else self.lm_head


class Medusa(HeadsByDepth):
    """Medusa heads on a frozen target (`heads.modules.interface.HeadModule`); depth k predicts x_{j+2+k}."""

    taps: Sequence[int] = ()

    def __init__(self, settings: MedusaSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(target)
        self.settings = settings
        width = target.config.get_text_config().hidden_size
        self.blocks = nn.ModuleList(ResidualBlocks(width, settings.num_layers) for _ in range(settings.num_depths))
        self.add_output_heads(lambda: DraftHead(target, vocabulary, trainable=settings.train_head))

    def forward(self, batch: Batch, states: TargetStates) -> list[Depth]:
        """Run each depth's blocks at the origins it is trained on."""
        depths = []
        for depth, blocks in enumerate(self.blocks):
            origins_N = labelled_origins(batch, depth)
            head = self.output_head(depth)
            hidden_ND = blocks(flat(states.final_BTE, origins_N))
            depths.append(head.at_depth(depth, hidden_ND, origins_N, weight=self.settings.depth_decay**depth))
        return depths

    def draft_logits(self, final_BE: Tensor, num_depths: int) -> Sequence[Tensor]:
        """Return the logits `[B, W]` of the first depths, from the target's final state at the origin.

        A shared output head reads all depths in one product, so that its weights are fetched once a round.
        """
        states = [blocks(final_BE) for blocks in self.blocks[:num_depths]]
        if self.settings.own_output_heads:
            return [self.output_head(depth).logits(state_BE) for depth, state_BE in enumerate(states)]
        return self.lm_head.logits(torch.stack(states, 1)).unbind(1)


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


class MedusaDrafts:
    """Medusa heads as a proposer (`heads.proposers.protocol.TreeProposer`); drafts at most as many tokens as there are heads.

    All it remembers is the target's final state at the last position that the target has read and that stayed.
    """

    taps: Sequence[int] = ()
    num_trees = 1

    def __init__(self, module: Medusa, device: torch.device) -> None:
        self.module, self.device = module, device
        self._final_BE: Tensor

    def start(self, tokens: Tokens, capacity: int, states: TargetStates) -> None:
        self._final_BE = self._columns(states, [len(row) - 2 for row in tokens])  # the last token of a row is pending

    def propose(
        self, tokens: Tokens, num_tokens: int, sampling: SamplingConfig, rng: CounterRNG, *, keep_logits: bool
    ) -> Proposal:
        chain = self.module.output_head(0).start_chain(tokens, sampling, rng, keep_logits=keep_logits)
        for logits_BW in self.module.draft_logits(self._final_BE, num_tokens):
            chain.add(logits_BW)
        return chain.proposal()

    def propose_tree(
        self, tokens: Tokens, tree: Tree | DynamicTreeSpec, drawn_by: SamplingConfig | None, rng: CounterRNG
    ) -> Proposal:
        head, tree = self.module.output_head(0), tree.cut(self.module.settings.num_depths)
        lengths = text_of(tokens, self.device).lengths
        builder = tree_builder(tree, lengths, drawn_by, rng, head.target_ids, head.scatter)
        for logits_BW in self.module.draft_logits(self._final_BE, tree.depth):
            builder.add(logits_BW.unsqueeze(1))  # a head's distribution is the same whatever was drafted before
        return builder.proposal()

    def commit(self, num_accepted: Sequence[int], states: TargetStates) -> None:
        self._final_BE = self._columns(states, num_accepted)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._final_BE = self._final_BE[on_device(rows, self.device)]

    def _columns(self, states: TargetStates, columns: Sequence[int]) -> Tensor:
        """Return the final state `[B, E]` of each row at its own column."""
        rows_B = torch.arange(len(columns), device=self.device)
        return states.final_BTE[rows_B, on_device(columns, self.device)]


FAMILY = Family(settings=MedusaSettings, build=Medusa, propose=MedusaDrafts, in_one_forward=True)

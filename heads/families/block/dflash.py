"""DFlash: a block of future tokens filled in one forward, with the target's fused states as keys and values of every layer.

arXiv 2602.06036. The context of position t is norm(fc(taps)) there. A block stands at the pending token x_a: its slot 0 holds
that token's embedding, slots 1 to S - 1 the mask token's, at positions a to a + S - 1. In every layer the slots see the
context before a and, in both directions, each other; slot s then predicts x_{a+s}. As a slot's output depends on how many
masks follow, the whole block is always run. With `sample_from_anchor` slot s, from 0, predicts x_{a+s+1}. Tensor names are
those that serving engines know.

Departures: trained on the target's distribution, not on the token of the text; drafts are drawn. Left out: sliding layers.
B batch, T positions, A anchors of a row, S slots of a block, X = A * S, G drafts, D width, F taps side by side.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema.heads import DFlashSettings
from heads.device import upload
from heads.families.eagle3 import default_taps
from heads.frozen.hidden_states import TargetStates
from heads.inference.kv_cache import RowCache
from heads.modules.autoregressive import FeatureProposer
from heads.modules.block_training import Anchors, BlockKeys, before_anchors, choose_anchors
from heads.modules.initialization import mask_token
from heads.modules.interface import Auxiliary, Batch, Depth, Family, flat
from heads.modules.layer_shape import LayerShape, layer_shape
from heads.modules.layers import CachedKeys, DraftLayer, Rotary, norm
from heads.modules.output_head import DraftHead, HeadModule
from heads.proposers.chain_builder import ChainBuilder
from heads.uploads import TokenRows
from heads.vocabulary import DraftVocabulary


class DFlash(HeadModule):
    """A DFlash head on a frozen target (`heads.modules.output_head.HeadModule`)."""

    settings: DFlashSettings

    def __init__(self, settings: DFlashSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(target)
        self.settings = resolved(settings, target)
        self.taps = tuple(self.settings.taps or ())
        self.num_caches = settings.num_layers
        self.mask_token_id = mask_token(self.settings.mask_token_id, target)
        shape = layer_shape(target, settings.layer)
        self.fc = nn.Linear(len(self.taps) * shape.width, shape.width, bias=False)
        self.hidden_norm = norm(shape)
        self.layers = nn.ModuleList(self.new_layer(shape) for _ in range(settings.num_layers))
        self.norm = norm(shape)
        self.lm_head = DraftHead(target, vocabulary, trainable=settings.train_head)
        self.rotary = Rotary(shape)

    def new_layer(self, shape: LayerShape) -> DraftLayer:
        """Return a new layer."""
        return DraftLayer(shape, norm_heads=True)

    def forward(self, batch: Batch, states: TargetStates) -> list[Depth]:
        """Fill a block at each of some anchors drawn at random, or at every possible one when not training."""
        anchors = choose_anchors(batch, self.settings.num_anchors if self.training else None)
        context_BTD = self.features(states)
        rotation = self.rotary(context_BTD, batch.position_ids_BT)
        places_BA = upload(anchors.places_BA, batch.input_ids_BT.device)
        pending_BA, first_BA = (each.gather(1, places_BA) for each in (batch.input_ids_BT, batch.position_ids_BT))
        keys = BlockKeys(context_BTD, rotation, before_anchors(places_BA, first_BA))
        states_BXD = self.embed(self._block_ids(pending_BA).flatten(1))
        rotation = self.rotary(states_BXD, self._block_positions(first_BA).flatten(1))
        for layer in self.layers:
            states_BXD = layer(states_BXD, rotation, keys)
        return self.depths(batch, anchors, self.norm(states_BXD).unflatten(1, (-1, self.settings.block_size)))

    def depths(self, batch: Batch, anchors: Anchors, states_BASD: Tensor) -> list[Depth]:
        """Return every depth, from the final, normed states of the blocks' slots, or what else its logits are made of."""
        drafting_BAGD = states_BASD[:, :, self.settings.first_slot :]
        return [self.depth(batch, anchors, number, each) for number, each in enumerate(drafting_BAGD.unbind(2))]

    def features(self, states: TargetStates) -> Tensor:
        """Return what every layer makes keys and values of, `[B, T, D]`."""
        return self.hidden_norm(self.fc(states.joined_BTF.to(self.fc.weight.dtype)))

    def read(self, context_BTD: Tensor, positions_BT: Tensor, cache: RowCache) -> None:
        """Add the context at `positions_BT`, for which the cache's `place` was called, to the cache of every layer."""
        rotation = self.rotary(context_BTD, positions_BT)
        for number, layer in enumerate(self.layers):
            cache.update(*cast(DraftLayer, layer).self_attn.keys_values(context_BTD, rotation), number)

    def fill(self, pending_B: Tensor, positions_B: Tensor, cache: RowCache) -> Tensor:
        """Return the final, normed states `[B, S, D]` of a block, whose slot 0 holds the pending token at these positions.

        The cache holds the context before it; its `place` was called for the block.
        """
        positions_BS = self._block_positions(positions_B)
        states_BSD = self.embed(self._block_ids(pending_B))
        rotation = self.rotary(states_BSD, positions_BS)
        visible_B11S = cache.visible(positions_BS[:, -1:]).unsqueeze(1)  # whatever the last slot sees, all of them do
        for number, layer in enumerate(self.layers):
            states_BSD = layer(states_BSD, rotation, CachedKeys(cache, number, visible_B11S))
        return self.norm(states_BSD)

    def depth(self, batch: Batch, anchors: Anchors, number: int, states_BAD: Tensor) -> Depth:
        """Return a depth, counted from 0, from the states of its slot."""
        rows_N, columns_N = anchors.labelled(batch, number + 1).nonzero(as_tuple=True)
        origins_N = rows_N * batch.input_ids_BT.shape[1] + anchors.places_BA[rows_N, columns_N] - 1
        hidden_ND = flat(states_BAD, rows_N * anchors.places_BA.shape[1] + columns_N)
        weight, row_weights_N = math.exp(-number / self.settings.position_decay), anchors.weights_BA[rows_N, columns_N]
        row_weights_N = upload(row_weights_N, hidden_ND.device)
        return self.lm_head.at_depth(number, hidden_ND, origins_N, weight=weight, row_weights_N=row_weights_N)

    def corrected(self, depth: Depth, hidden_ND: Tensor, parameters: Iterable[Tensor], *, base_weight: float = 0.0) -> Depth:
        """Return a depth whose logits are those that `self.logits` makes of other states.

        Args:
            depth: of the output head's logits.
            hidden_ND: what `self.logits` reads.
            parameters: what it depends on besides the output head.
            base_weight: in training, of the loss of the output head's logits, which is added to that of the corrected ones.
        """
        base = Auxiliary(hidden_ND=depth.hidden_ND, logits_of=depth.logits_of, parameters=depth.parameters, weight=base_weight)
        return replace(
            depth,
            hidden_ND=hidden_ND,
            logits_of=self.logits,
            parameters=(*depth.parameters, *parameters),
            auxiliaries=(base,) if self.training and base_weight > 0 else (),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., W]` that are drafted from, of the states that a depth holds."""
        return self.lm_head.logits(hidden)

    def _block_ids(self, pending: Tensor) -> Tensor:
        """Return the ids `[..., S]` in the slots of blocks."""
        masks = pending.new_full((*pending.shape, self.settings.block_size - 1), self.mask_token_id)
        return torch.cat([pending.unsqueeze(-1), masks], -1)

    def _block_positions(self, first: Tensor) -> Tensor:
        return first.unsqueeze(-1) + torch.arange(self.settings.block_size, device=first.device)


class BlockDrafter(FeatureProposer):
    """A DFlash head as a proposer (`heads.proposers.protocol.Proposer`); drafts at most as many tokens as there are slots.

    The cache holds the context; a block's own keys and values lie after it for one round, and the next context is written over
    them.
    """

    module: DFlash

    def __init__(self, module: DFlash, device: torch.device) -> None:
        super().__init__(module, device, beyond=module.settings.block_size)

    def draft(self, text: TokenRows, chain: ChainBuilder, num_tokens: int) -> None:
        first, window = self.module.settings.first_slot, self._pending.read(text)
        positions_BT = self._place(window.first, window.features_BTF.shape[1])
        self.module.read(window.features_BTF, positions_BT, self._cache)
        positions_BS = self._place(window.ends, self.module.settings.block_size)
        pending_B = text.pending_B1.squeeze(1)
        states_BSD = self.module.fill(pending_B, positions_BS[:, 0], self._cache)
        self.choose(states_BSD, slice(first, first + num_tokens), pending_B, chain)

    def choose(self, states_BSD: Tensor, slots: slice, pending_B: Tensor, chain: ChainBuilder) -> None:
        """Choose a draft for each of these slots; one product with the output head serves all of them."""
        for logits_BW in self.module.lm_head.logits(states_BSD[:, slots]).unbind(1):
            chain.add(logits_BW)


class DraftStep(NamedTuple):
    """What a draft is chosen by: its logits, the head's estimate of its acceptance, and what the next step is given."""

    logits_BW: Tensor
    estimate_B: Tensor | None = None
    carried: Tensor | None = None


class StepwiseDrafter(BlockDrafter):
    """Chooses the drafts of a block one after another, each by logits that depend on those before."""

    def choose(self, states_BSD: Tensor, slots: slice, pending_B: Tensor, chain: ChainBuilder) -> None:
        """Choose a draft for each of these slots until the chain is finished."""
        before_B, carried, states_BGD = pending_B, None, states_BSD[:, slots]
        logits_BGW = self.module.lm_head.logits(states_BGD)
        for state_BD, logits_BW in zip(states_BGD.unbind(1), logits_BGW.unbind(1), strict=True):
            step = self.step(logits_BW, state_BD, before_B, carried)
            before_B, carried = chain.add(step.logits_BW, step.estimate_B), step.carried
            if chain.finished:
                break

    @abstractmethod
    def step(self, logits_BW: Tensor, state_BD: Tensor, before_B: Tensor, carried: Tensor | None) -> DraftStep:
        """Return what a slot's draft is chosen by.

        Args:
            logits_BW: the output head's of the slot's state.
            state_BD: final, normed.
            before_B: the token before, the target's id.
            carried: by the step before; None at the first.
        """


def resolved(settings: DFlashSettings, target: PreTrainedModel) -> DFlashSettings:
    """Return the settings with nothing left open that depends on the target."""
    taps = list(default_taps(target)) if settings.taps is None else settings.taps
    return settings.model_copy(update={"taps": taps, "mask_token_id": mask_token(settings.mask_token_id, target)})


FAMILY = Family(settings=DFlashSettings, build=DFlash, propose=BlockDrafter, in_one_forward=True)

"""DFlash: a block of future tokens filled in one forward, with the target's fused states as keys and values of every layer.

arXiv 2602.06036. The context of position t is norm(fc(taps)) there. A block stands at the pending token x_a, its anchor: slot 0
holds that token's embedding, slots 1 to S - 1 the mask token's, at positions a to a + S - 1. In every layer the slots see the
context before a and, in both directions, each other; slot s then predicts x_{a+s}. As a slot's output depends on how many
masks follow, the whole block is always run. With `sample_from_anchor` slot s, from 0, predicts x_{a+s+1}. In training many
blocks, at tokens of the target's own, are run side by side and do not see each other. Tensor names are those that serving
engines know.

Departures: trained on the target's distribution, not on the token of the text; drafts are drawn. Left out: sliding layers.
B batch, T positions, A anchors of a row, S slots of a block, X = A * S, G drafts, D width, F taps side by side, N heads, M
key-value heads, H head width, C conversations.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema.heads import DFlashSettings
from heads.device import upload
from heads.families.eagle3 import default_taps, mask_token
from heads.frozen.hidden_states import TargetStates
from heads.inference.kv_cache import RowCache
from heads.modules.attention import CachedKeys, Ranges, read_ranges
from heads.modules.autoregressive import FeatureProposer
from heads.modules.interface import Auxiliary, Batch, Depth, Family, by_row, flat, labelled_origins
from heads.modules.layers import DraftAttention, DraftLayer, LayerKeys, LayerShape, Rotary, Rotation, layer_shape, norm
from heads.modules.output_head import DraftHead, HeadModule
from heads.proposers.builders import ChainBuilder
from heads.proposers.protocol import RoundInputs
from heads.vocabulary import DraftVocabulary


class DFlash(HeadModule):
    """A DFlash head on a frozen target (`heads.modules.output_head.HeadModule`)."""

    settings: DFlashSettings

    def __init__(self, settings: DFlashSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(target)
        self.taps = tuple(default_taps(target) if settings.taps is None else settings.taps)
        self.mask_token_id = mask_token(settings.mask_token_id, target)
        self.settings = settings.model_copy(update={"taps": list(self.taps), "mask_token_id": self.mask_token_id})
        self.num_caches = settings.num_layers
        shape = layer_shape(target, settings.layer)
        self.fc = nn.Linear(len(self.taps) * shape.width, shape.width, bias=False)
        self.hidden_norm = norm(shape)
        self.layers = nn.ModuleList(self.new_layer(shape) for _ in range(settings.num_layers))
        self.norm = norm(shape)
        self.lm_head = DraftHead(target, vocabulary, trainable=settings.train_head)
        self.rotary = Rotary(shape)

    def new_layer(self, shape: LayerShape) -> DraftLayer:
        return DraftLayer(shape, norm_heads=True)

    def forward(self, batch: Batch, states: TargetStates) -> list[Depth]:
        """Fill a block at each of some anchors drawn at random, or at every possible one when not training."""
        anchors = choose_anchors(batch, self.settings.num_anchors if self.training else None)
        context_BTD = self.features(states)
        rotation = self.rotary(context_BTD, batch.position_ids_BT)
        places_BA = upload(anchors.places_BA, batch.input_ids_BT.device)
        pending_BA, first_BA = (each.gather(1, places_BA) for each in (batch.input_ids_BT, batch.position_ids_BT))
        ranges = Ranges(first_BX=places_BA - first_BA, end_BX=places_BA)
        keys = BlockKeys(context_BTD, rotation, ranges, self.settings.block_size)
        states_BXD = self.embed(self._block_ids(pending_BA).flatten(1))
        rotation = self.rotary(states_BXD, self._block_positions(first_BA).flatten(1))
        for layer in self.layers:
            states_BXD = layer(states_BXD, rotation, keys)
        return self.depths(batch, anchors, self.norm(states_BXD).unflatten(1, (-1, self.settings.block_size)))

    def depths(self, batch: Batch, anchors: Anchors, states_BASD: Tensor) -> list[Depth]:
        """Return every depth, from the final, normed states of the blocks' slots, or what else its logits are made of."""
        drafting_BAGD = states_BASD[:, :, self.settings.first_slot :]
        return [self.depth(batch, anchors, number, each) for number, each in enumerate(drafting_BAGD.unbind(2))]

    def depth(self, batch: Batch, anchors: Anchors, number: int, states_BAD: Tensor) -> Depth:
        """Return a depth, counted from 0, from the states of its slot."""
        rows_N, columns_N = anchors.labelled(batch, number + 1).nonzero(as_tuple=True)
        origins_N = rows_N * batch.input_ids_BT.shape[1] + anchors.places_BA[rows_N, columns_N] - 1
        hidden_ND = flat(states_BAD, rows_N * anchors.places_BA.shape[1] + columns_N)
        row_weights_N = upload(anchors.weights_BA[rows_N, columns_N], hidden_ND.device)
        return self.at_depth(number, hidden_ND, origins_N, row_weights_N=row_weights_N)

    def depth_weight(self, depth: int) -> float:
        return 1.0 if self.settings.position_decay is None else math.exp(-depth / self.settings.position_decay)

    @property
    def weighs_by_acceptance(self) -> bool:
        return self.settings.position_decay is None

    def features(self, states: TargetStates) -> Tensor:
        """Return what every layer makes keys and values of, `[B, T, D]`."""
        return self.hidden_norm(self.fc(states.joined_BTF.to(self.fc.weight.dtype)))

    def read(self, context_BTD: Tensor, positions_BT: Tensor, cache: RowCache) -> None:
        """Add the context at placed positions to the cache of every layer."""
        rotation = self.rotary.drafting(positions_BT)
        for number, layer in enumerate(self.layers):
            cache.update(*cast(DraftLayer, layer).self_attn.keys_values(context_BTD, rotation), number)

    def fill(self, pending_B: Tensor, positions_B: Tensor, cache: RowCache) -> Tensor:
        """Return the final, normed states `[B, S, D]` of a placed block, whose context the cache holds."""
        positions_BS = self._block_positions(positions_B)
        states_BSD = self.embed(self._block_ids(pending_B))
        rotation = self.rotary.drafting(positions_BS)
        visible_B11S = cache.visible(positions_BS[:, -1:]).unsqueeze(1)  # whatever the last slot sees, all of them do
        for number, layer in enumerate(self.layers):
            states_BSD = layer(states_BSD, rotation, CachedKeys(cache, number, visible_B11S))
        return self.norm(states_BSD)

    def _block_ids(self, pending: Tensor) -> Tensor:
        masks = pending.new_full((*pending.shape, self.settings.block_size - 1), self.mask_token_id)
        return torch.cat([pending.unsqueeze(-1), masks], -1)

    def _block_positions(self, first: Tensor) -> Tensor:
        return first.unsqueeze(-1) + torch.arange(self.settings.block_size, device=first.device)


class CorrectedBlock(DFlash):
    """A DFlash head whose logits are corrected: a depth holds final states and, after them, what else `correct` reads."""

    @abstractmethod
    def correct(self, base: Tensor, joined: Tensor) -> Tensor:
        """Return logits `[..., W]` made of the output head's own and of what a depth holds."""

    def logits(self, joined: Tensor) -> Tensor:
        return self.correct(self.lm_head.logits(joined[..., : self.fc.out_features]), joined)

    def corrected(self, depth: Depth, joined_NX: Tensor, parameters: Iterable[Tensor], *, base_weight: float = 0.0) -> Depth:
        """Return a depth of the output head's logits with those that `logits` makes of `joined_NX` and these parameters.

        `base_weight`: in training, of the loss of the output head's logits, which is added to that of the corrected ones.
        """
        state_ND = joined_NX[:, : self.fc.out_features]
        base = Auxiliary(hidden_ND=state_ND, logits_of=depth.logits_of, parameters=depth.parameters, weight=base_weight)
        return replace(
            depth,
            hidden_ND=joined_NX,
            logits_of=self.logits,
            parameters=(*depth.parameters, *parameters),
            auxiliaries=(base,) if self.training and base_weight > 0 else (),
        )


class DraftStep(NamedTuple):
    """What a draft is chosen by: its logits, the head's estimate of its acceptance, and what the next step is given."""

    logits_BW: Tensor
    estimate_B: Tensor | None = None
    carried: Tensor | None = None


class StepwiseBlock(CorrectedBlock):
    """A block whose drafts are chosen one after another, each by logits that depend on those before."""

    @abstractmethod
    def step(self, base_BW: Tensor, state_BD: Tensor, before_B: Tensor, carried: Tensor | None) -> DraftStep:
        """Return what a slot's draft is chosen by: of the output head's logits, the slot's final state, the token before (the
        target's id), and what the step before has carried on; None at the first."""


class BlockDrafter(FeatureProposer):
    """A DFlash head as a proposer (`heads.proposers.protocol.Proposer`); drafts at most as many tokens as there are slots.

    A block's own keys and values lie after the context for one round; the next context is written over them.
    """

    module: DFlash

    def __init__(self, module: DFlash, device: torch.device) -> None:
        super().__init__(module, device, beyond=module.settings.block_size)

    def draft(self, inputs: RoundInputs, chain: ChainBuilder, num_tokens: int) -> None:
        first, window = self.module.settings.first_slot, self._pending.read(inputs)
        positions_BT = self._place(window.first, window.features_BTF.shape[1])
        self.module.read(window.features_BTF, positions_BT, self._cache)
        positions_BS = self._place(window.ends, self.module.settings.block_size)
        pending_B = inputs.pending_B1.squeeze(1)
        states_BSD = self.module.fill(pending_B, positions_BS[:, 0], self._cache)
        self.choose(states_BSD, slice(first, first + num_tokens), pending_B, chain)

    def choose(self, states_BSD: Tensor, slots: slice, pending_B: Tensor, chain: ChainBuilder) -> None:
        """Choose a draft for each of these slots; one product with the output head serves all of them."""
        for logits_BW in self.module.lm_head.logits(states_BSD[:, slots]).unbind(1):
            chain.add(logits_BW)


class StepwiseDrafter(BlockDrafter):
    """A `StepwiseBlock` as a proposer."""

    module: StepwiseBlock

    def choose(self, states_BSD: Tensor, slots: slice, pending_B: Tensor, chain: ChainBuilder) -> None:
        before_B, carried, states_BGD = pending_B, None, states_BSD[:, slots]
        logits_BGW = self.module.lm_head.logits(states_BGD)
        for state_BD, base_BW in zip(states_BGD.unbind(1), logits_BGW.unbind(1), strict=True):
            step = self.module.step(base_BW, state_BD, before_B, carried)
            before_B, carried = chain.add(step.logits_BW, step.estimate_B), step.carried
            if chain.finished:
                break


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """Anchors by row, padded on the right to at least one; in host memory."""

    places_BA: Tensor  # int64, columns of the anchors in their rows, rising; 0 on padding
    valid_BA: Tensor  # bool, False on padding
    weights_BA: Tensor  # float32, how many of its conversation's possible anchors each one stands for; 0 on padding

    def labelled(self, batch: Batch, ahead: int) -> Tensor:
        """Return the anchors `[B, A]` for which the token so many places on, and all before it, are the same answer's, bool."""
        T, others_BT = batch.input_ids_BT.shape[1], (~batch.on_host.loss_mask_BT).cumsum(1)
        label_BA = (self.places_BA + ahead).clamp(max=T - 1)
        unbroken_BA = others_BT.gather(1, label_BA) == others_BT.gather(1, self.places_BA)
        return self.valid_BA & (self.places_BA + ahead < T) & unbroken_BA

    def tokens(self, batch: Batch, first: int, count: int) -> Tensor:
        """Return the ids `[B, A, count]` from `first` places behind the anchors on; past a row's edge its outermost token."""
        T = batch.input_ids_BT.shape[1]
        columns = (self.places_BA.unsqueeze(-1) + torch.arange(first, first + count)).clamp(0, T - 1)
        columns = upload(columns, batch.input_ids_BT.device)
        return batch.input_ids_BT.gather(1, columns.flatten(1)).unflatten(1, (-1, count))


def choose_anchors(batch: Batch, limit: int | None) -> Anchors:
    """Choose anchors, tokens of the target's own followed by another: `limit` of each conversation at random, or all.

    Draws are by torch's own generator. With their weights, sums over the drawn ones have the mean of sums over all.
    """
    batch, T = batch.on_host, batch.input_ids_BT.shape[1]
    origins_N = labelled_origins(batch, 0)
    origins_N = origins_N[batch.loss_mask_BT.flatten()[origins_N + 1]]
    weights_N = torch.ones(len(origins_N))
    if limit is not None:
        rank_N, count_N = _drawn(origins_N // T, batch.document_ids_BT.flatten()[origins_N])
        kept_N = rank_N < limit
        origins_N, weights_N = origins_N[kept_N], (count_N / count_N.clamp(max=limit))[kept_N]
    rows_N, columns_N, places_BA = by_row(origins_N + 1, len(batch.input_ids_BT), T)
    weights_BA = torch.zeros_like(places_BA, dtype=torch.float32)
    weights_BA[rows_N, columns_N] = weights_N
    return Anchors(places_BA=places_BA, valid_BA=places_BA > 0, weights_BA=weights_BA)


def _drawn(rows_N: Tensor, documents_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank of each possible anchor in a random order of its conversation's (a document's of a row), and how many
    that has; rows rise, and so do documents within a row."""
    changes_N = torch.ones_like(rows_N)
    changes_N[1:] = (rows_N[1:] != rows_N[:-1]) | (documents_N[1:] != documents_N[:-1])
    own_N = changes_N.cumsum(0) - 1
    counts_C = torch.bincount(own_N)
    order_N = (own_N + torch.rand(len(own_N), dtype=torch.float64)).argsort()
    rank_N = torch.empty_like(own_N)
    rank_N[order_N] = torch.arange(len(own_N)) - (counts_C.cumsum(0) - counts_C)[own_N]
    return rank_N, counts_C[own_N]


class BlockKeys(LayerKeys):
    """What blocks see besides themselves: of a context, turned by `rotation`, their ranges, `ranges` by slot."""

    def __init__(self, context_BTD: Tensor, rotation: Rotation, ranges: Ranges, block_size: int) -> None:
        self.context_BTD, self.rotation, self.block_size = context_BTD, rotation, block_size
        ends = (each.repeat_interleave(block_size, 1) for each in (ranges.first_BX, ranges.end_BX))
        self.of_slots = Ranges(first_BX=next(ends), end_BX=next(ends))

    def attend(self, attention: DraftAttention, states_BXD: Tensor, rotation: Rotation) -> Tensor:
        """In one softmax over their range of the context and their block's slots."""
        context = attention.keys_values(self.context_BTD, self.rotation)
        k_BMASH, v_BMASH = (each.unflatten(2, (-1, self.block_size)) for each in attention.keys_values(states_BXD, rotation))
        q_BNXH = attention.queries(states_BXD, rotation)
        read = q_BNXH, *read_ranges(q_BNXH, *context, self.of_slots)
        q_BMGASH, read_BMGASH, log_sum_BMGAS = (
            each.unflatten(1, (k_BMASH.shape[1], -1)).unflatten(3, (-1, self.block_size)) for each in read
        )
        own_BMGASR = torch.einsum("bmgash,bmarh->bmgasr", q_BMGASH, k_BMASH).to(log_sum_BMGAS.dtype) * q_BNXH.shape[-1] ** -0.5
        weights = torch.cat([log_sum_BMGAS.unsqueeze(-1), own_BMGASR], -1).softmax(-1).to(v_BMASH.dtype)
        own_BMGASH = torch.einsum("bmgasr,bmarh->bmgash", weights[..., 1:], v_BMASH)
        return attention.output((weights[..., :1] * read_BMGASH + own_BMGASH).flatten(3, 4).flatten(1, 2))


FAMILY = Family(settings=DFlashSettings, build=DFlash, propose=BlockDrafter)

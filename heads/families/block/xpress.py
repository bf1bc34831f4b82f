"""XPress: a DFlash block whose logits a small causal refiner corrects, in passes over all slots at once.

To the logits of slot s the refiner adds a bias made of the tokens before the slots up to s, of these slots' final states and
of the block's mean state. In training the tokens are the text's own. When drafting they are those of the pass before: the
first pass reads what the logits without bias give, and each pass settles one more draft. After as many passes as drafts the
block is what drafting token by token would have given; with fewer, the last drafts rest on tokens of an earlier pass.

A slot has one random number for all passes, and drafts are drawn from the last pass's logits. What slot s reads depends on the
numbers of the slots before it and not on its own, so the output keeps the target's distribution after any number of passes.
Tensor names are those of the speculators library.
B batch, A anchors of a row, S slots, G drafts, D width, R width of the refiner, W draft vocabulary, N rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.schema.heads import XPressSettings
from heads.device import row_tensor
from heads.families.block.dflash import Anchors, BlockDrafter, CorrectedBlock
from heads.modules.interface import Auxiliary, Batch, Depth, Family
from heads.proposers.chain_builder import ChainBuilder
from heads.proposers.protocol import RoundInputs
from heads.vocabulary import DraftVocabulary, target_ids

CHUNK = 512  # slots whose logits live at one time, where only the likeliest tokens are wanted


class XPress(CorrectedBlock):
    """An XPress head on a frozen target; a depth holds the final state and the refiner's."""

    settings: XPressSettings

    def __init__(self, settings: XPressSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(settings, target, vocabulary)
        self.refiner_head = Refiner(self.lm_head.vocab_size, self.lm_head.num_tokens, self.fc.out_features, settings)

    def correct(self, base: Tensor, joined: Tensor) -> Tensor:
        return base + self.refiner_head.readout(joined[..., self.fc.out_features :])

    def depths(self, batch: Batch, anchors: Anchors, states_BASD: Tensor) -> list[Depth]:
        first, num_slots = self.settings.first_slot, self.settings.block_size
        features = self.refiner_head.features(states_BASD)
        text_BAS = anchors.tokens(batch, -first, num_slots)
        refined = [self.refiner_head(features, text_BAS)]
        if self.training and self.settings.consistency_weight > 0:
            for number in range(self.settings.consistency_passes):
                drafted_BAS = self._likeliest(torch.cat([states_BASD, refined[-1]], -1) if number else states_BASD)
                before_BAS = torch.cat([text_BAS[..., : first + 1], drafted_BAS[..., first:-1]], -1)
                refined.append(self.refiner_head(features, before_BAS))
        return super().depths(batch, anchors, torch.cat([states_BASD, *refined], -1))

    def depth(self, batch: Batch, anchors: Anchors, number: int, states_BAD: Tensor) -> Depth:
        depth = super().depth(batch, anchors, number, states_BAD)
        width, settings = self.fc.out_features, self.settings
        state_ND = depth.hidden_ND[:, :width]
        refined_ND, *own = (
            torch.cat([state_ND, each], 1) for each in depth.hidden_ND[:, width:].split(settings.xpress_rank, 1)
        )
        readout = self.refiner_head.readout.weight
        depth = self.corrected(replace(depth, hidden_ND=state_ND), refined_ND, [readout], base_weight=settings.base_weight)
        weight = settings.consistency_weight / max(1, len(own))
        passes = [Auxiliary(hidden_ND=each, logits_of=self.logits, parameters=depth.parameters, weight=weight) for each in own]
        return replace(depth, auxiliaries=(*passes, *depth.auxiliaries))

    @torch.no_grad()
    def _likeliest(self, joined: Tensor) -> Tensor:
        """Return the likeliest tokens of slots, the target's ids `[...]`; of final states alone, those before the refiner."""
        logits_of = self.lm_head.logits if joined.shape[-1] == self.fc.out_features else self.logits
        ids = [logits_of(rows).argmax(-1) for rows in joined.flatten(0, -2).split(CHUNK)]
        return target_ids(self.lm_head.vocabulary, torch.cat(ids)).view(joined.shape[:-1])


class Refiner(nn.Module):
    """The refiner: a causal mix over the slots for each of R channels, and an MLP."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, width: int, settings: XPressSettings) -> None:
        super().__init__()
        rank, inner = settings.xpress_rank, settings.xpress_rank * settings.xpress_mlp_ratio
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h = nn.Linear(width, rank, bias=False)
        self.down_g = nn.Linear(width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, settings.block_size, settings.block_size))
        self.mlp_gate = nn.Linear(rank, inner, bias=False)
        self.mlp_up = nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, draft_vocab_size, bias=False)
        for layer in self.children():
            nn.init.normal_(cast(Tensor, layer.weight), std=0.02)

    def features(self, states: Tensor) -> Tensor:
        """Return what all passes read of a block's final states `[..., S, D]`, `[..., S, 2R]`."""
        own, mean = self.down_h(states), self.down_g(states.mean(-2, keepdim=True))
        return torch.cat([own, mean.expand_as(own)], -1)

    def forward(self, features: Tensor, before: Tensor) -> Tensor:
        """Return the refiner's states `[..., S, R]` of the first S slots, from theirs and the token before each, `[..., S]`."""
        num_slots = before.shape[-1]
        read = self.in_proj(torch.cat([features, self.token_embed(before).to(features.dtype)], -1))
        mix_RSS = self.mix_l[:, :num_slots, :num_slots].tril().to(read.dtype)
        mixed = read + torch.einsum("rst,...tr->...sr", mix_RSS, read)
        return mixed + self.mlp_down(functional.silu(self.mlp_gate(mixed)) * self.mlp_up(mixed))


class RefinedDrafter(BlockDrafter):
    """An XPress head as a proposer."""

    module: XPress
    _before_B1: Tensor  # the token before the pending one, by row

    def draft(self, inputs: RoundInputs, chain: ChainBuilder, num_tokens: int) -> None:
        self._before_B1 = row_tensor([row[-2:-1] for row in inputs.tokens], self.device)
        super().draft(inputs, chain, num_tokens)

    def choose(self, states_BSD: Tensor, slots: slice, pending_B: Tensor, chain: ChainBuilder) -> None:
        refiner, num_drafts = self.module.refiner_head, slots.stop - slots.start
        features = refiner.features(states_BSD)[:, : slots.stop]
        known_BK = torch.cat([self._before_B1, pending_B.unsqueeze(1)], 1)[:, 1 - slots.start :]
        base_BGW = self.module.lm_head.logits(states_BSD[:, slots])
        logits_BGW = base_BGW
        for _ in range(min(self.module.settings.num_jacobi_passes, num_drafts)):
            before_BS = torch.cat([known_BK, chain.peek(logits_BGW)[:, :-1]], 1)
            logits_BGW = base_BGW + refiner.readout(refiner(features, before_BS)[:, slots])
        for logits_BW in logits_BGW.unbind(1):
            chain.add(logits_BW)


FAMILY = Family(settings=XPressSettings, build=XPress, propose=RefinedDrafter, in_one_forward=True)

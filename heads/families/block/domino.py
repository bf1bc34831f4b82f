"""Domino: a DFlash block whose logits are corrected by a recurrent state of the tokens before each slot.

A GRU reads the embeddings of the pending token and of the tokens after it, one for each draft: in training the text's own, when
drafting those just drafted. To the logits of every draft but the first comes E2 silu(E1 [z; g]), with z the slot's final state
and g the GRU's after the token before. The layers run once for the block; only GRU and correction go token by token. The
correction starts at 0. Tensor names are those of SpecForge, whose correction leaves the first draft out, too.

Departures: trained on the target's distribution, not on the token of the text; the logits without correction are trained
too, at a fixed weight in place of one that falls from 1 to 0 over the run.
B batch, A anchors of a row, S slots, G drafts, D width, R width of the recurrent state, W draft vocabulary, N rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.schema.heads import DominoSettings
from heads.families.block.dflash import Anchors, DraftStep, StepwiseBlock, StepwiseDrafter
from heads.modules.interface import Batch, Depth, Family
from heads.vocabulary import DraftVocabulary


class Domino(StepwiseBlock):
    """A Domino head on a frozen target; a depth holds the final state and the GRU's."""

    settings: DominoSettings

    def __init__(self, settings: DominoSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(settings, target, vocabulary)
        width = self.fc.out_features
        self.prefix_gru = nn.GRU(width, settings.gru_hidden_dim, bias=False, batch_first=True)
        inner = nn.Linear(width + settings.gru_hidden_dim, settings.emb_dim, bias=False)
        self.embed_proj = nn.Sequential(inner, nn.SiLU(), nn.Linear(settings.emb_dim, self.lm_head.num_tokens, bias=False))
        nn.init.zeros_(cast(Tensor, self.embed_proj[2].weight))

    def correct(self, base: Tensor, joined: Tensor) -> Tensor:
        corrected: Tensor = base + self.embed_proj(joined)
        return corrected

    def depths(self, batch: Batch, anchors: Anchors, states_BASD: Tensor) -> list[Depth]:
        embedded_BAGD = self.embed(anchors.tokens(batch, 0, self.settings.longest_draft))
        before_BAGR = self.prefix_gru(embedded_BAGD.flatten(0, 1))[0].unflatten(0, embedded_BAGD.shape[:2])
        before_BASR = functional.pad(before_BAGR, (0, 0, self.settings.first_slot, 0))  # slots that draft nothing read nothing
        return super().depths(batch, anchors, torch.cat([states_BASD, before_BASR.to(states_BASD.dtype)], -1))

    def depth(self, batch: Batch, anchors: Anchors, number: int, states_BAD: Tensor) -> Depth:
        depth = super().depth(batch, anchors, number, states_BAD)
        joined_NX = depth.hidden_ND
        depth = replace(depth, hidden_ND=joined_NX[:, : self.fc.out_features])
        if number == 0:
            return depth
        return self.corrected(depth, joined_NX, self.embed_proj.parameters(), base_weight=self.settings.base_weight)

    def step(self, base_BW: Tensor, state_BD: Tensor, before_B: Tensor, carried: Tensor | None) -> DraftStep:
        _, read_1BR = self.prefix_gru(self.embed(before_B).unsqueeze(1), carried)
        if carried is not None:
            base_BW = self.correct(base_BW, torch.cat([state_BD, read_1BR[0].to(state_BD.dtype)], -1))
        return DraftStep(base_BW, carried=read_1BR)


FAMILY = Family(settings=DominoSettings, build=Domino, propose=StepwiseDrafter, in_one_forward=True)

"""Domino: a DFlash block whose logits are corrected by a recurrent state of the tokens before each slot.

A GRU reads the embeddings of the pending token and of the tokens after it, one for each draft: in training the text's own, when
drafting those just drafted. To the logits of every draft but the first comes E2 silu(E1 [z; g]), with z the slot's final state
and g the GRU's after the token before. The layers run once for the block; only GRU and correction go token by token. The
correction starts at 0. Tensor names are those of SpecForge, whose correction leaves the first draft out, too.

Departures: trained on the target's distribution, not on the token of the text; the logits without correction are trained beside
those with it at a fixed weight, in place of one that falls from 1 to 0 over the run.
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
from heads.families.block.dflash import DFlash, DraftStep, StepwiseDrafter
from heads.modules.auxiliary import Auxiliary, assisted
from heads.modules.block_training import Anchors
from heads.modules.interface import Batch, Depth, Family
from heads.proposers.vocabulary import DraftVocabulary


class Domino(DFlash):
    """A Domino head on a frozen target; what its output head reads is the final state and the GRU's, joined."""

    settings: DominoSettings

    def __init__(self, settings: DominoSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(settings, target, vocabulary)
        num_drafted = self.lm_head.vocab_size if vocabulary is None else len(vocabulary)
        width = self.fc.out_features
        self.prefix_gru = PrefixGru(width, settings.gru_hidden_dim)
        inner = nn.Linear(width + settings.gru_hidden_dim, settings.emb_dim, bias=False)
        self.embed_proj = nn.Sequential(inner, nn.SiLU(), nn.Linear(settings.emb_dim, num_drafted, bias=False))
        nn.init.zeros_(cast(Tensor, self.embed_proj[2].weight))

    def logits(self, joined: Tensor) -> Tensor:
        """Return the corrected logits `[..., W]` of final states and the GRU's, joined."""
        corrected: Tensor = self.lm_head.logits(joined[..., : self.fc.out_features]) + self.embed_proj(joined)
        return corrected

    def depths(self, batch: Batch, anchors: Anchors, states_BASD: Tensor) -> list[Depth]:
        embedded_BAGD = self.embed(anchors.tokens(batch, 0, self.settings.longest_draft))
        read, state_BAR = [], self.prefix_gru.initial(embedded_BAGD[:, :, 0])
        for each_BAD in embedded_BAGD.unbind(2):
            state_BAR = self.prefix_gru(each_BAD, state_BAR)
            read.append(state_BAR)
        before_BAGR = torch.stack(read, 2)
        before_BASR = functional.pad(before_BAGR, (0, 0, self.settings.first_slot, 0))  # slots that draft nothing read nothing
        return super().depths(batch, anchors, torch.cat([states_BASD, before_BASR.to(states_BASD.dtype)], -1))

    def depth(self, batch: Batch, anchors: Anchors, number: int, states_BAD: Tensor) -> Depth:
        depth = super().depth(batch, anchors, number, states_BAD)
        joined_NX = depth.hidden_ND
        depth = replace(depth, hidden_ND=joined_NX[:, : self.fc.out_features])
        if number == 0:
            return depth
        base = Auxiliary(
            hidden_ND=depth.hidden_ND,
            logits_of=depth.logits_of,
            parameters=depth.parameters,
            weight=self.settings.base_weight,
        )
        return assisted(
            depth,
            hidden_ND=joined_NX,
            logits_of=self.logits,
            parameters=(*depth.parameters, *self.embed_proj.parameters()),
            auxiliaries=(base,) if self.training and base.weight > 0 else (),
        )


class PrefixGru(nn.Module):
    """A gated recurrent unit without biases, in the layout of torch's: reset, update, new."""

    def __init__(self, width: int, state_width: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * state_width, width))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * state_width, state_width))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(state_width**-0.5), state_width**-0.5)

    def initial(self, embedded: Tensor) -> Tensor:
        """Return the state `[..., R]` before anything is read."""
        return embedded.new_zeros(*embedded.shape[:-1], self.weight_hh_l0.shape[1])

    def forward(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Return the state `[..., R]` after one more token, from its embedding `[..., D]`."""
        reset_in, update_in, new_in = functional.linear(embedded, self.weight_ih_l0).chunk(3, -1)
        reset_state, update_state, new_state = functional.linear(state, self.weight_hh_l0).chunk(3, -1)
        reset, update = (reset_in + reset_state).sigmoid(), (update_in + update_state).sigmoid()
        return torch.lerp((new_in + reset * new_state).tanh(), state.to(update.dtype), update)


class CorrectedDrafter(StepwiseDrafter):
    """A Domino head as a proposer."""

    module: Domino

    def step(self, logits_BW: Tensor, state_BD: Tensor, before_B: Tensor, carried: Tensor | None) -> DraftStep:
        """Correct every draft but the first by the GRU's state, which is what is carried on."""
        module, embedded_BD = self.module, self.module.embed(before_B)
        gru_BR = module.prefix_gru(embedded_BD, module.prefix_gru.initial(embedded_BD) if carried is None else carried)
        if carried is not None:
            logits_BW = logits_BW + module.embed_proj(torch.cat([state_BD, gru_BR.to(state_BD.dtype)], -1))
        return DraftStep(logits_BW, carried=gru_BR)


FAMILY = Family(settings=DominoSettings, build=Domino, propose=CorrectedDrafter, in_one_forward=True)

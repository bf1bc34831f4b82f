"""DSpark: a DFlash block whose slots also read the token before them, and an estimate of how likely each draft is accepted.

To the logits of slot s comes W2 W1[x_{a+s-1}], a Markov bias of low rank: in training the text's own token, when drafting the
one just drafted. The layers run once for the block all the same; only the choice of tokens goes slot by slot. A confidence
head reads the slot's final state and W1[x_{a+s-1}] and is trained, by binary cross-entropy, to predict the slot's
acceptance 1 - TV(p, q). When drafting it is the proposal's estimate, by which a rule may end the round early
(`decode.stopping` with `by: estimate`): the later slots then cost the target no rows. It depends on the context and on the
tokens drafted before the slot, so the output's distribution stays (`heads.proposers.chain_builder`). Tensor names are those
that serving engines know. Left out: the gated and the recurrent bias.
B batch, N rows of one depth, G drafts, D width, R rank of the bias, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema.heads import DSparkSettings
from heads.families.block.dflash import Anchors, DraftStep, StepwiseBlock, StepwiseDrafter
from heads.modules.interface import Batch, Depth, Family, flat
from heads.vocabulary import DraftVocabulary


class DSpark(StepwiseBlock):
    """A DSpark head on a frozen target; a depth holds the final state and W1 of the token before."""

    settings: DSparkSettings

    def __init__(self, settings: DSparkSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(settings, target, vocabulary)
        rank = settings.markov_rank
        by_token, bias = nn.Embedding(self.lm_head.vocab_size, rank), nn.Linear(rank, self.lm_head.num_tokens, bias=False)
        nn.init.zeros_(bias.weight)  # an untrained bias is 0
        self.markov_head = nn.ModuleDict({"markov_w1": by_token, "markov_w2": bias})
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(self.fc.out_features + rank, 1)})

    def joined(self, states: Tensor, before: Tensor) -> Tensor:
        """Return the input of logits and confidence, `[..., D + R]`, from final states and the tokens before them."""
        return torch.cat([states, self.markov_head["markov_w1"](before).to(states.dtype)], -1)

    def confidence(self, joined: Tensor) -> Tensor:
        """Return the logit `[...]` of the probability that a draft is accepted."""
        return cast(Tensor, self.confidence_head["proj"](joined).squeeze(-1))

    def correct(self, base: Tensor, joined: Tensor) -> Tensor:
        return base + cast(Tensor, self.markov_head["markov_w2"](joined[..., self.fc.out_features :]))

    def depth(self, batch: Batch, anchors: Anchors, number: int, states_BAD: Tensor) -> Depth:
        depth = super().depth(batch, anchors, number, states_BAD)
        joined_ND = self.joined(depth.hidden_ND, flat(batch.input_ids_BT, depth.origins_N + number + 1))
        return replace(
            self.corrected(depth, joined_ND, self.markov_head["markov_w2"].parameters()),
            confidence_N=self.confidence(joined_ND),
            confidence_weight=self.settings.confidence_weight,
        )

    def step(self, base_BW: Tensor, state_BD: Tensor, before_B: Tensor, carried: Tensor | None) -> DraftStep:
        joined_BD = self.joined(state_BD, before_B)
        return DraftStep(self.correct(base_BW, joined_BD), self.confidence(joined_BD).float().sigmoid())


FAMILY = Family(settings=DSparkSettings, build=DSpark, propose=StepwiseDrafter, in_one_forward=True)

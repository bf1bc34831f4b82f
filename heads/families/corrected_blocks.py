"""DFlash blocks whose logits are corrected by the tokens before each slot: DSpark, Domino, DFlash2 and XPress.

In training these tokens are the text's own, when drafting those just drafted; the layers run once for the block all the same.

DSpark adds W2 W1[x_{a+s-1}] to the logits of slot s. A confidence head reads the slot's final state and W1[x_{a+s-1}] and is
trained, by binary cross-entropy, to predict the slot's acceptance 1 - TV(p, q). When drafting it is the proposal's estimate, by
which a rule may end the round early (`decode.stopping` with `by: estimate`). It depends on the context and on the tokens before
the slot alone, so the output's distribution stays. Left out: the gated and the recurrent bias.

Domino adds E2 silu(E1 [z; g]) to the logits of every draft but the first, with z the slot's final state and g that of a GRU
over the embeddings from the pending token to the one before the slot. Departures: trained on the target's distribution; the
logits without correction are trained too, at a fixed weight in place of one that falls from 1 to 0 over the run.

DFlash2 mixes, in every layer, what attention and MLP read and put out with that of the slots before (a causal convolution, a
kernel for each channel plus one for each group of channels that the slot's own state makes). A selector takes the K likeliest
tokens C of a slot's logits u and adds s_c = sum_r P[b]_r (H z)_r S[c]_r to u_c, with b the token before. What is drafted from
is q(c) = p_u(C) softmax_C(u + s)_c for candidates and p_u(v) for other tokens, above 0 wherever p_u is, so any divergence can
train it; u by itself is trained too (`unary_weight`). speculators' selector learns the target's likeliest token alone.

XPress adds a bias that a causal refiner makes of the tokens before the slots up to s, of their final states and of the block's
mean state, in passes over all slots at once: each reads the drafts of the pass before and settles one more. After as many
passes as drafts the block is what drafting token by token gives. A slot has one random number for all passes, and what it reads
depends on those of the slots before it alone, so the output keeps the target's distribution after any number of passes.

Corrections start at 0, convolutions as the identity. Tensor names are those of serving engines, of SpecForge (Domino) and of
speculators.
B batch, A anchors of a row, X slots of all blocks, S slots of one, G drafts, D width, R rank or width of the correction, W
draft vocabulary, N rows, Z channels of a group, J slots of a kernel, K candidates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.heads import DFlash2Settings, DominoSettings, DSparkSettings, XPressSettings
from heads.device import row_tensor
from heads.families.dflash import Anchors, BlockDrafter, CorrectedBlock, DraftStep, StepwiseBlock, StepwiseDrafter
from heads.modules.interface import Batch, Depth, Family, flat
from heads.modules.layers import DraftLayer, LayerKeys, LayerShape, Rotation
from heads.proposers.builders import ChainBuilder
from heads.proposers.protocol import RoundInputs
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


DSPARK = Family(settings=DSparkSettings, build=DSpark, propose=StepwiseDrafter)


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
        if number == 0:
            return replace(depth, hidden_ND=depth.hidden_ND[:, : self.fc.out_features])
        return self.corrected(depth, depth.hidden_ND, self.embed_proj.parameters(), base_weight=self.settings.base_weight)

    def step(self, base_BW: Tensor, state_BD: Tensor, before_B: Tensor, carried: Tensor | None) -> DraftStep:
        _, read_1BR = self.prefix_gru(self.embed(before_B).unsqueeze(1), carried)
        if carried is not None:
            base_BW = self.correct(base_BW, torch.cat([state_BD, read_1BR[0].to(state_BD.dtype)], -1))
        return DraftStep(base_BW, carried=read_1BR)


DOMINO = Family(settings=DominoSettings, build=Domino, propose=StepwiseDrafter)


class DFlash2(StepwiseBlock):
    """A DFlash2 head on a frozen target; a depth holds the final state and the selector's context."""

    settings: DFlash2Settings

    def __init__(self, settings: DFlash2Settings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(settings, target, vocabulary)
        num_drafted = self.lm_head.num_tokens
        if settings.selector_top_k > num_drafted:
            raise InputError(f"head.selector_top_k: {settings.selector_top_k} candidates of {num_drafted} draft tokens")
        width, rank = self.fc.out_features, settings.selector_rank
        self.candidate_selector = CandidateSelector(self.lm_head.vocab_size, num_drafted, width, rank)

    def new_layer(self, shape: LayerShape) -> DraftLayer:
        return ConvolvedLayer(shape, self.settings)

    def joined(self, states: Tensor, before: Tensor) -> Tensor:
        """Return the input of the logits, `[..., D + R]`, from final states and the tokens before them."""
        return torch.cat([states, self.candidate_selector.context(states, before)], -1)

    def correct(self, base: Tensor, joined: Tensor) -> Tensor:
        """Return logits `[..., W]` with the candidates' mass shared out by the selector."""
        unary, context = base, joined[..., self.fc.out_features :]
        candidates = unary.topk(self.settings.selector_top_k).indices
        unary_K = unary.gather(-1, candidates)
        scores_K = unary_K + self.candidate_selector.scores(context, candidates).to(unary.dtype)
        mass = unary_K.float().logsumexp(-1, keepdim=True) - scores_K.float().logsumexp(-1, keepdim=True)
        return unary.scatter(-1, candidates, scores_K + mass.to(unary.dtype))

    def depth(self, batch: Batch, anchors: Anchors, number: int, states_BAD: Tensor) -> Depth:
        depth = super().depth(batch, anchors, number, states_BAD)
        joined_ND = self.joined(depth.hidden_ND, flat(batch.input_ids_BT, depth.origins_N + number + 1))
        codebook = self.candidate_selector.successor_codebook
        return self.corrected(depth, joined_ND, [codebook], base_weight=self.settings.unary_weight)

    def step(self, base_BW: Tensor, state_BD: Tensor, before_B: Tensor, carried: Tensor | None) -> DraftStep:
        return DraftStep(self.correct(base_BW, self.joined(state_BD, before_B)))


class CandidateSelector(nn.Module):
    """The selector: a code for each token before, of the target's vocabulary, and for each candidate, of the draft's."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(0.02 * torch.randn(vocab_size, rank))
        self.successor_codebook = nn.Parameter(0.02 * torch.randn(draft_vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        nn.init.normal_(self.hidden_projection.weight, std=0.02)

    def context(self, states: Tensor, before: Tensor) -> Tensor:
        """Return what a slot's candidates are scored by, `[..., R]`."""
        return functional.embedding(before, self.predecessor_codebook).to(states.dtype) * self.hidden_projection(states)

    def scores(self, context: Tensor, candidates: Tensor) -> Tensor:
        """Return the score `[..., K]` of each candidate, a draft id."""
        codes = functional.embedding(candidates, self.successor_codebook).to(context.dtype)
        return (codes @ context.unsqueeze(-1)).squeeze(-1)


class ConvolvedLayer(DraftLayer):
    """DFlash's layer with a convolution before and after attention and MLP."""

    def __init__(self, shape: LayerShape, settings: DFlash2Settings) -> None:
        super().__init__(shape, norm_heads=True)
        self.attention_conv = SlotConvolution(shape.width, settings)
        self.mlp_conv = SlotConvolution(shape.width, settings)

    def forward(self, states_BXD: Tensor, rotation: Rotation, keys: LayerKeys) -> Tensor:
        read_BXD, kernels = self.attention_conv.before(self.input_layernorm(states_BXD))
        states_BXD = states_BXD + self.attention_conv.after(keys.attend(self.self_attn, read_BXD, rotation), kernels)
        read_BXD, kernels = self.mlp_conv.before(self.post_attention_layernorm(states_BXD))
        return states_BXD + self.mlp_conv.after(self.mlp(read_BXD), kernels)


class SlotConvolution(nn.Module):
    """Two causal convolutions over the slots of each block, whose kernels are read from the first one's input."""

    def __init__(self, width: int, settings: DFlash2Settings) -> None:
        super().__init__()
        self.block_size, self.group_size, size = settings.block_size, settings.conv_group_size, settings.conv_kernel_size
        if width % self.group_size:
            raise InputError(f"head.conv_group_size: groups of {self.group_size} channels do not divide the width {width}")
        self.base_kernel = nn.Parameter(torch.zeros(2, size, width))
        self.kernel_projection = nn.Linear(width, 2 * size * (width // self.group_size), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def before(self, states_BXD: Tensor) -> tuple[Tensor, Tensor]:
        """Return convolved states `[B, X, D]`, and what `after` makes its kernels of."""
        kernels = self.kernel_projection(states_BXD).unflatten(-1, (2, self.base_kernel.shape[1], -1))
        first, second = kernels.unbind(-3)
        return self._mixed(states_BXD, first, self.base_kernel[0]), second

    def after(self, states_BXD: Tensor, kernels: Tensor) -> Tensor:
        """Return convolved states `[B, X, D]`."""
        return self._mixed(states_BXD, kernels, self.base_kernel[1])

    def _mixed(self, states_BXD: Tensor, kernels: Tensor, base_JD: Tensor) -> Tensor:
        """Mix each slot with those before it in its block; `kernels` are `[B, X, J, D / Z]`."""
        kernels_BXJD = base_JD.to(states_BXD.dtype) + kernels.repeat_interleave(self.group_size, -1)
        blocks, mixed_BXD = states_BXD.unflatten(1, (-1, self.block_size)), torch.zeros_like(states_BXD)
        for back, kernel_BXD in enumerate(kernels_BXJD.unbind(2)):
            shifted = functional.pad(blocks, (0, 0, back, 0))[:, :, : self.block_size]
            mixed_BXD = mixed_BXD + shifted.flatten(1, 2) * kernel_BXD
        return mixed_BXD


DFLASH2 = Family(settings=DFlash2Settings, build=DFlash2, propose=StepwiseDrafter)


class XPress(CorrectedBlock):
    """An XPress head on a frozen target; a depth holds the final state and the refiner's."""

    settings: XPressSettings

    def __init__(self, settings: XPressSettings, target: PreTrainedModel, vocabulary: DraftVocabulary | None) -> None:
        super().__init__(settings, target, vocabulary)
        self.refiner_head = Refiner(self.lm_head.vocab_size, self.lm_head.num_tokens, self.fc.out_features, settings)

    def correct(self, base: Tensor, joined: Tensor) -> Tensor:
        return base + self.refiner_head.readout(joined[..., self.fc.out_features :])

    def depths(self, batch: Batch, anchors: Anchors, states_BASD: Tensor) -> list[Depth]:
        before_BAS = anchors.tokens(batch, -self.settings.first_slot, self.settings.block_size)
        refined_BASR = self.refiner_head(self.refiner_head.features(states_BASD), before_BAS)
        return super().depths(batch, anchors, torch.cat([states_BASD, refined_BASR], -1))

    def depth(self, batch: Batch, anchors: Anchors, number: int, states_BAD: Tensor) -> Depth:
        depth = super().depth(batch, anchors, number, states_BAD)
        readout = self.refiner_head.readout.weight
        return self.corrected(depth, depth.hidden_ND, [readout], base_weight=self.settings.base_weight)


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


XPRESS = Family(settings=XPressSettings, build=XPress, propose=RefinedDrafter)

"""DFlash2: a DFlash block with convolutions over its slots, whose likeliest tokens a selector scores by the token before them.

In every layer, what attention and MLP read and what they put out is mixed with that of the slots before (a causal convolution
over the block, a kernel for each channel plus one for each group of channels that the slot's own state makes). The selector
takes the K likeliest tokens C of a slot's logits u and adds to u_c, of each of them, s_c = sum_r P[b]_r (H z)_r S[c]_r, with z
the slot's final state and b the token before: in training the text's own, when drafting the one just drafted.

What is drafted from is q(c) = p_u(C) softmax_C(u + s)_c for the candidates and p_u(v), the softmax of u, for other tokens: the
selector shares out the candidates' mass. The likeliest token is the one with the highest u_c + s_c, which published heads draft
greedily. q is above 0 wherever p_u is, so any divergence can train it; u by itself is trained too (`unary_weight`).
Convolutions start as the identity. Tensor names are those of the speculators library, whose selector learns the target's
likeliest token alone.
B batch, X slots of all blocks, S slots of one, D width, Z channels of a group, J slots of a kernel, K candidates, R rank, W
draft vocabulary, N rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.heads import DFlash2Settings
from heads.families.block.dflash import Anchors, DraftStep, StepwiseBlock, StepwiseDrafter
from heads.modules.interface import Batch, Depth, Family, flat
from heads.modules.layers import DraftLayer, LayerKeys, LayerShape, Rotation
from heads.vocabulary import DraftVocabulary


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


FAMILY = Family(settings=DFlash2Settings, build=DFlash2, propose=StepwiseDrafter, in_one_forward=True)

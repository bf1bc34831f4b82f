"""The head families: one settings class each, beside one file in `heads/families`. Imports no torch.

Depths count future tokens from 1; the loss weighs depth k with `depth_decay ** (k - 1)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from configs.schema.base import (
    AutoBlock,
    AutoInt,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Settings,
    unless_rising,
)


class LayerSettings(Settings):
    """Sizes of a head's layers; None: the target's. A head trained here takes the target's; an imported one may have its own.

    The width is always the target's, whose hidden states and embedding the layers read.
    """

    mlp_width: PositiveInt | None = None  # of the MLP's inner layer
    num_heads: PositiveInt | None = None  # attention heads
    num_key_value_heads: PositiveInt | None = None  # heads of keys and values
    head_width: PositiveInt | None = None  # of an attention head
    norm_epsilon: PositiveFloat | None = None  # of RMS norms
    rope_theta: PositiveFloat | None = None  # base of the rotary embedding
    # How rotary frequencies are scaled (llama3, yarn, linear), in the keys of transformers' `rope_parameters`; None: not.
    rope_scaling: dict[str, Any] | None = None
    max_positions: PositiveInt | None = None  # longest context of the rotary embedding, in tokens


class HeadSettings(Settings):
    """Settings of every family."""

    # tokens the head can propose, the most frequent in answers; None: all; auto: those that the answers use, rounded up to a
    # multiple of 1,024, at most 32,768
    draft_vocab_size: AutoInt | None = None
    train_head: bool = False  # learn the rows of the output head too; they start as the target's
    depth_decay: PositiveShare = 0.8  # weight in the loss of each depth over the one before it

    @property
    def longest_draft(self) -> int | None:
        """How many tokens the head can draft in a round; None: any number."""
        return None

    @property
    def drafted_as_trained(self) -> int | None:
        """How many drafts of a round, from the first, are made of the logits that training has for them; None: all."""
        return None


class TappedSettings(HeadSettings):
    """A family that reads the residual stream after some of the target's blocks."""

    taps: list[NonNegativeInt] | None = None  # h_0 is the embedding output, h_i the state after block i; None: low, mid, high
    layer: LayerSettings | None = None  # sizes of the head's layers; None: those of the target's blocks

    def objections(self) -> Iterator[str]:
        if self.taps == []:
            yield "taps must name at least one state, got []"
        yield from unless_rising("taps", self.taps, "state")


class MedusaSettings(HeadSettings):
    """Independent residual heads on the final state (Cai et al. 2024, arXiv 2401.10774)."""

    kind: Literal["medusa"]
    num_depths: PositiveInt = 4  # future tokens, a head each
    num_layers: PositiveInt = 1  # residual blocks a head, no weights shared
    own_output_heads: bool = False  # an output head for each depth, in place of one for all; needs train_head

    @property
    def longest_draft(self) -> int:
        return self.num_depths

    def objections(self) -> Iterator[str]:
        if self.own_output_heads and not self.train_head:
            yield "own_output_heads needs train_head true: else they would be so many copies of the target's head"


class HydraSettings(HeadSettings):
    """Medusa's heads, each reading the tokens drafted before it (Ankner et al. 2024, arXiv 2402.05109)."""

    kind: Literal["hydra"]
    num_depths: PositiveInt = 4  # future tokens, a head each
    num_layers: PositiveInt = 1  # residual blocks after the one that joins state and embeddings
    prefix_attention: bool = False  # Hydra++: a decoder layer over the final states first
    norm_embeddings: bool = True  # an RMS norm of the tokens' embeddings
    layer: LayerSettings | None = None  # sizes of the prefix layer; None: those of the target's blocks
    window: AutoInt | None = None  # positions that the prefix layer reads, the last so many; auto and None as for EAGLE-3

    @property
    def longest_draft(self) -> int:
        return self.num_depths

    def objections(self) -> Iterator[str]:
        for name in ("layer", "window"):
            if not self.prefix_attention and getattr(self, name) is not None:
                yield f"{name} is of the prefix layer: set prefix_attention to true, or {name} to null"


class EagleSettings(TappedSettings):
    """Layers over fused taps and the next token's embedding: EAGLE-3 and P-EAGLE."""

    num_layers: PositiveInt = 1  # decoder layers of the head
    num_depths: PositiveInt = 4  # tokens predicted in training
    norm_taps: bool = False  # an RMS norm of each tap before they are joined
    norm_joined_taps: bool | None = None  # an RMS norm of all taps as one vector (speculators' norm_before_fc)
    own_embedding: bool | None = None  # an embedding of the head's own, which starts as the target's
    qk_norm: bool | None = None  # an RMS norm of each head's queries and keys, as in Qwen3's layers
    norm_before_residual: bool = False  # the residual starts from the normed feature
    # start attention output and MLP from this block of the target, counted from 0; auto: from the one that reads the last tap,
    # and from none where that has another shape
    init_block: AutoBlock | None = None

    def objections(self) -> Iterator[str]:
        yield from super().objections()
        if self.norm_taps and self.norm_joined_taps:
            yield "norm_taps and norm_joined_taps exclude each other: taps are normed each or as one vector"


class Eagle3Settings(EagleSettings):
    """Layers unrolled over their own states (Li et al. 2025, arXiv 2503.01840)."""

    kind: Literal["eagle3"]
    num_depths: PositiveInt = 4  # steps unrolled in training, each fed the one before ("training-time test")
    # As in EAGLE-3.1 (arXiv 2605.09992); llama.cpp and OpenVINO know neither
    norm_taps: bool = True  # an RMS norm of each tap before they are joined
    norm_feedback: bool = True  # the state fed back is the normed one
    # Positions that attention reads, the last so many and a query's own counted; auto: about as many as nine tenths of the
    # training conversations have; None: all
    window: AutoInt | None = None

    def objections(self) -> Iterator[str]:
        yield from super().objections()
        if isinstance(self.window, int) and self.window <= self.num_depths:
            yield f"window must be larger than num_depths, whose own states a draft reads, got {self.window}"


class MtpSettings(HeadSettings):
    """Next-token embedding and final state, joined and passed through a block of the target's architecture (DeepSeek-V3)."""

    kind: Literal["mtp"]
    num_depths: PositiveInt = 4  # depths trained
    reads: Literal["post_norm", "pre_norm"] = "post_norm"  # the target's last state after its final norm, or (MiMo) before it
    init_block: NonNegativeInt | None = None  # start the block from this one of the target's; None: the last of attention
    init: Literal["scratch", "checkpoint"] = "scratch"  # checkpoint: the MTP weights in the target's own folder

    def objections(self) -> Iterator[str]:
        if self.init == "checkpoint" and self.init_block is not None:
            yield f"init_block {self.init_block} would be overwritten by init checkpoint: leave one of the two out"


class PEagleSettings(EagleSettings):
    """EAGLE-3's layers, which predict all depths in one forward (P-EAGLE)."""

    kind: Literal["peagle"]
    num_layers: PositiveInt = 4  # decoder layers of the head
    num_depths: PositiveInt = 8  # tokens predicted in one forward
    # depth d + 1 is trained on this share of the origins that depth d is trained on, drawn anew
    keep_share: PositiveShare = 0.7
    min_keep_share: PositiveShare = 0.2  # ... but not on fewer than this share of all
    mask_token_id: NonNegativeInt | None = None  # None: the padding or the first end-of-text id

    @property
    def longest_draft(self) -> int:
        return self.num_depths


class DFlashSettings(TappedSettings):
    """A block filled in one forward, with the target's context as keys and values (DFlash, arXiv 2602.06036)."""

    kind: Literal["dflash"]
    num_layers: PositiveInt = 2  # decoder layers of the head
    block_size: Annotated[int, Field(ge=2)] = 8  # slots: the pending token's and masks
    num_anchors: PositiveInt = 64  # blocks a conversation and step, drawn at random
    # depth k, from 1, weighs exp(-(k - 1) / position_decay); None: as the blocks' acceptance says (D-PACE, arXiv 2605.18810)
    position_decay: PositiveFloat | None = None
    depth_decay: Annotated[float, Field(ge=1, le=1)] = 1.0  # fixed: position_decay says what a depth weighs
    mask_token_id: NonNegativeInt | None = None  # None: the padding or the first end-of-text id
    sample_from_anchor: bool = False  # the pending token's slot drafts too, the token after it, and each slot one further

    @property
    def first_slot(self) -> int:
        """The slot of the first draft."""
        return 0 if self.sample_from_anchor else 1

    @property
    def longest_draft(self) -> int:
        return self.block_size - self.first_slot


class DSparkSettings(DFlashSettings):
    """DFlash with a low-rank Markov bias and a confidence head."""

    kind: Literal["dspark"]  # type: ignore[assignment]
    markov_rank: PositiveInt = 128  # of the matrix that scores a token by the one before it
    confidence_weight: NonNegativeFloat = 1.0  # of the confidence head's loss


class DFlash2Settings(DFlashSettings):
    """DFlash with convolutions over the slots of a block, whose likeliest tokens are scored by the token before."""

    kind: Literal["dflash2"]  # type: ignore[assignment]
    conv_kernel_size: PositiveInt = 2  # slots that a convolution reads: its own and those before it
    conv_group_size: PositiveInt = 16  # channels that share a kernel; divides the width
    selector_rank: PositiveInt = 128  # of the product that scores a candidate by the token before it and the slot's state
    selector_top_k: PositiveInt = 16  # candidates: the likeliest tokens before the selector
    unary_weight: NonNegativeFloat = 1.0  # of the loss of the logits before the selector, beside that of those after it

    def objections(self) -> Iterator[str]:
        yield from super().objections()
        if self.conv_kernel_size > self.block_size:
            yield f"conv_kernel_size must be at most block_size {self.block_size}, got {self.conv_kernel_size}"


class XPressSettings(DFlashSettings):
    """DFlash with a causal refiner over the slots of a block, which drafting applies to the whole block again and again."""

    kind: Literal["xpress"]  # type: ignore[assignment]
    xpress_rank: PositiveInt = 128  # width of the refiner
    xpress_mlp_ratio: PositiveInt = 2  # of its MLP's inner width to that
    num_jacobi_passes: PositiveInt = 6  # of the refiner over a block in drafting; no more than drafts are made
    base_weight: NonNegativeFloat = 0.6  # of the loss of the logits before the refiner

    @property
    def drafted_as_trained(self) -> int:
        return self.num_jacobi_passes


class DominoSettings(DFlashSettings):
    """DFlash whose logits are corrected by a recurrent state of the tokens before each slot."""

    kind: Literal["domino"]  # type: ignore[assignment]
    gru_hidden_dim: PositiveInt = 256  # width of the recurrent state
    emb_dim: PositiveInt = 128  # inner width of the correction
    base_weight: NonNegativeFloat = 0.5  # of the loss of the logits without correction, beside that of those with it


class EarlyExitSettings(TappedSettings):
    """An adapter of one attention layer after the target's first blocks, which draft (Kangaroo, arXiv 2404.18911)."""

    kind: Literal["early_exit"]
    # the one state h_k that it reads: blocks 1 to k run for every draft. None: after a quarter of the blocks
    taps: Annotated[list[PositiveInt], Field(min_length=1, max_length=1)] | None = None
    num_depths: PositiveInt = 4  # tokens that held-out predictions tell; one function drafts all, and trains as the first
    depth_decay: Annotated[float, Field(ge=1, le=1)] = 1.0  # fixed: one depth is trained


HeadConfig = Annotated[
    MedusaSettings
    | HydraSettings
    | Eagle3Settings
    | MtpSettings
    | PEagleSettings
    | DFlashSettings
    | DSparkSettings
    | DFlash2Settings
    | XPressSettings
    | DominoSettings
    | EarlyExitSettings,
    Field(discriminator="kind"),
]

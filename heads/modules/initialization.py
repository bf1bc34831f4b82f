"""What a head starts training from: weights copied from the target, and the mask token's id.

An EAGLE head whose feature starts as the last tap and whose layers start as one of the target's blocks passes on the target's
state from the first step, and learns only what the next token changes.
D width of the target and of the layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from heads.frozen.hidden_states import blocks, num_blocks
from heads.frozen.placement import real_weights

OTHER_TAPS_STD = 0.002  # standard deviation of the weights on taps that are not passed on: small next to 1, but not dead
COPIED = ("self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@torch.no_grad()
def pass_last_tap(projection: nn.Linear) -> None:
    """Let a projection of taps that stand side by side, `[D, A * D]`, start as the last of them."""
    nn.init.normal_(projection.weight, std=OTHER_TAPS_STD)
    width = projection.out_features
    projection.weight[:, -width:] += torch.eye(width)


@torch.no_grad()
def copy_block(target: PreTrainedModel, number: int, layer: nn.Module) -> None:
    """Start a layer from a block of a Llama-like target: attention, MLP and the norms before them.

    A first layer's queries, keys and values also read the embedding; that half of them stays random. Where the target norms
    queries and keys, as Qwen3 does, its projections mean something else, and all of them stay random.

    Args:
        target: whose block it is.
        number: which, from 0. A feature that starts as the state after block n (from 1) was that of block n (from 0).
        layer: a `heads.families.eagle3.Eagle3Layer`.

    Raises:
        InputError: there is no such block, or it is built otherwise, as Gemma's are, which norm what a sublayer puts out.
    """
    if not 0 <= number < num_blocks(target):
        raise InputError(f"head.init_block {number}: the target's blocks are 0 to {num_blocks(target) - 1}")
    own, source = layer.state_dict(), real_weights(blocks(target)[number])
    if "pre_feedforward_layernorm.weight" in source:
        raise InputError(f"head.init_block: a block of {type(target).__name__} norms otherwise than the head; leave it null")
    for name in COPIED:
        if name not in source or source[name].shape != own[name].shape:
            raise InputError(f"head.init_block: block {number} of {type(target).__name__} has no {name} that fits the head")
        own[name].copy_(source[name])
    first = "hidden_norm.weight" in own
    norms = {
        "post_attention_layernorm": "post_attention_layernorm",
        "hidden_norm" if first else "input_layernorm": "input_layernorm",
    }
    for name, copied in norms.items():
        if f"{copied}.weight" in source:
            own[f"{name}.weight"].copy_(source[f"{copied}.weight"])
    if "self_attn.q_norm.weight" not in source:
        _copy_projections(own, source)


def _copy_projections(own: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    """Copy queries, keys and values onto the part of the layer's that reads the state, its last D columns."""
    for name in PROJECTIONS:
        weight = source.get(f"self_attn.{name}.weight")
        mine = own[f"self_attn.{name}.weight"]
        if weight is not None and len(weight) == len(mine):
            mine[:, -weight.shape[1] :].copy_(weight)


def mask_token(given: int | None, target: PreTrainedModel) -> int:
    """Return the id of the mask token: the given one, else the target's padding token, else its first end-of-text token.

    Raises:
        InputError: the target has no such token, or the given id is not in its vocabulary.
    """
    config = target.config.get_text_config()
    if given is not None:
        if given >= config.vocab_size:
            raise InputError(f"head.mask_token_id: the target's tokens are 0 to {config.vocab_size - 1}, got {given}")
        return given
    for declared in (config.pad_token_id, config.eos_token_id):
        ids = declared if isinstance(declared, list) else [declared]
        known = [token for token in ids if token is not None and 0 <= token < config.vocab_size]
        if known:
            return int(known[0])
    raise InputError("head.mask_token_id: the target's config names neither a padding nor an end-of-text token; give an id")

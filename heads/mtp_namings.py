"""How checkpoints name the tensors of an MTP module, in the words of `heads.mtp`: all that is known about it.

k number of a module from 0, n the same counted on from the target's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How a family of checkpoints names a module's tensors; `{k}` is its number, `{n}` the same counted on from the blocks.

    Args:
        families: who uses it.
        prefix: of every tensor of a module.
        parts: by our name of a part (`heads.mtp.MtpLayer`), theirs.
        hidden_first: the projection reads [state ; embedding].
        reads: which of the target's last states these modules were trained on, and are given by engines.
        borrowed: copies of what is the target's (embedding, head, rotary frequencies), which are neither read nor written.
    """

    families: str
    prefix: str
    parts: Mapping[str, str]
    hidden_first: bool = False
    reads: Literal["post_norm", "pre_norm"] = "post_norm"
    borrowed: tuple[str, ...] = ()


NAMINGS = (
    Naming(
        families="Qwen3-Next, Qwen3.5",
        prefix="mtp.",
        parts={
            "eh_proj": "mtp.fc",
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "post_norm": "mtp.norm",
            "mtp_block": "mtp.layers.0",
        },
    ),
    Naming(
        families="MiMo",
        prefix="model.mtp_layers.{k}.",
        parts={
            "eh_proj": "model.mtp_layers.{k}.input_proj",
            "enorm": "model.mtp_layers.{k}.token_layernorm",
            "hnorm": "model.mtp_layers.{k}.hidden_layernorm",
            "post_norm": "model.mtp_layers.{k}.final_layernorm",
            "mtp_block": "model.mtp_layers.{k}",
        },
        hidden_first=True,
        reads="pre_norm",
    ),
    Naming(
        families="DeepSeek-V3, GLM-4-MoE",
        prefix="model.layers.{n}.",
        parts={
            "eh_proj": "model.layers.{n}.eh_proj",
            "enorm": "model.layers.{n}.enorm",
            "hnorm": "model.layers.{n}.hnorm",
            "post_norm": "model.layers.{n}.shared_head.norm",
            "mtp_block": "model.layers.{n}",
        },
        borrowed=("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq"),
    ),
    Naming(
        families="transformers",
        prefix="mtp.",
        parts={
            "eh_proj": "mtp.layers.{k}.eh_proj",
            "enorm": "mtp.layers.{k}.enorm",
            "hnorm": "mtp.layers.{k}.hnorm",
            "post_norm": "mtp.layers.{k}.post_norm",
            "mtp_block": "mtp.layers.{k}",
        },
    ),
)

"""The head families by name.

A new family is one file in this folder and its name in `NAMES` (docs/adding-a-head-family.md).
"""

from __future__ import annotations

from importlib import import_module
from itertools import chain

from torch import nn
from transformers import PreTrainedModel

from heads.inference.llama_layers import pack
from heads.modules.interface import Family
from heads.modules.target_block import wide_tensors

NAMES = (
    "medusa",
    "hydra",
    "eagle3",
    "peagle",
    "block.dflash",
    "block.dspark",
    "block.dflash2",
    "block.xpress",
    "block.domino",
    "mtp",
    "early_exit",
)

FAMILIES: dict[str, Family] = {name.rpartition(".")[2]: import_module(f"heads.families.{name}").FAMILY for name in NAMES}


def drafts_in_one_forward(kind: str) -> bool:
    """Return whether a kind of draft makes all drafts of a round in one forward; a draft LM does not."""
    return kind in FAMILIES and FAMILIES[kind].in_one_forward


def serve(head: nn.Module, target: PreTrainedModel) -> nn.Module:
    """Put a head, in place, on the target's device and into its dtype, frozen and packed for drafting.

    Copies of the target's blocks keep what the target keeps wider.
    """
    wide = wide_tensors(head, target)
    for tensor in chain(head.parameters(), head.buffers()):
        if tensor.is_floating_point() and id(tensor) not in wide:
            tensor.data = tensor.data.to(target.dtype)
    head.to(device=target.device).eval().requires_grad_(False)
    pack(head)
    return head

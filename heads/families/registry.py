"""The head families by name.

A new family is a file in this folder and its line in `FAMILIES` (docs/adding-a-head-family.md).
"""

from __future__ import annotations

from itertools import chain

from torch import nn
from transformers import PreTrainedModel

from heads.families import corrected_blocks, dflash, eagle3, early_exit, medusa, mtp, peagle
from heads.inference.lean_forward import pack
from heads.modules.interface import Family
from heads.modules.target_block import wide_tensors

FAMILIES: dict[str, Family] = {
    "medusa": medusa.MEDUSA,
    "hydra": medusa.HYDRA,
    "eagle3": eagle3.FAMILY,
    "peagle": peagle.FAMILY,
    "dflash": dflash.FAMILY,
    "dspark": corrected_blocks.DSPARK,
    "dflash2": corrected_blocks.DFLASH2,
    "xpress": corrected_blocks.XPRESS,
    "domino": corrected_blocks.DOMINO,
    "mtp": mtp.FAMILY,
    "early_exit": early_exit.FAMILY,
}


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

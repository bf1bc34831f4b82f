"""The head families by name.

A new family is a file in this folder and its line in `FAMILIES` (docs/adding-a-head-family.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn
from transformers import PreTrainedModel

from heads.families import corrected_blocks, dflash, eagle3, early_exit, medusa, mtp, peagle
from heads.frozen.hidden_states import blocks
from heads.inference.lean_forward import pack
from heads.modules.interface import Family

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
    wide = _wide_tensors(head, target)
    for tensor in chain(head.parameters(), head.buffers()):
        if tensor.is_floating_point() and id(tensor) not in wide:
            tensor.data = tensor.data.to(target.dtype)
    head.to(device=target.device).eval().requires_grad_(False)
    pack(head)
    return head


def _wide_tensors(head: nn.Module, target: PreTrainedModel) -> set[int]:
    """Return the `id` of each tensor in a head's copies of the target's blocks that the target keeps wider than its dtype."""
    kept = {
        (type(block), name)
        for block in blocks(target)
        for name, tensor in _tensors(block)
        if tensor.is_floating_point() and tensor.dtype != target.dtype
    }
    if not kept:
        return set()
    return {id(tensor) for part in head.modules() for name, tensor in _tensors(part) if (type(part), name) in kept}


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())

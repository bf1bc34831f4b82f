"""The MTP modules that a checkpoint brings along, read as a draft: `mtp.*` of Qwen, MiMo's, DeepSeek's and transformers' names.

The folder is the target's own checkpoint, or one in MiMo's layout that lies beside a target, as the export for vLLM is. Names,
the order of the projection and experts kept one by one are known to `heads.frozen.mtp_checkpoint`. The block is the
target's kind, so its tensors are those of the target's blocks. A bias of zeros is none: MiMo's layout wants them where a
Llama block has none.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from heads.formats.importing.external import ExternalDraft
from heads.formats.layout import Shapes
from heads.frozen.checkpoint_files import LazyTensor, Weights
from heads.frozen.mtp_checkpoint import NativeMtp, TensorPart

BACKBONE = "model.layers.0."  # of the target's first block


def read_native(folder: Path, weights: Weights, reads: str | None) -> ExternalDraft:
    """Return a checkpoint's MTP modules under our names.

    Args:
        folder, weights: of the checkpoint.
        reads: which of the target's last states they were trained on; None: as the naming says of a whole checkpoint, and after
            the final norm where the modules stand alone (`heads.formats.exporting.mtp.mimo` writes such, whatever their
            naming).

    Raises:
        InputError: the modules have no known naming.
    """
    native = NativeMtp(folder)
    several = native.num_layers > 1
    if reads is None:
        reads = native.naming.reads if any(name.startswith(BACKBONE) for name in weights) else "post_norm"
    settings = {"shared_depths": not several, "reads": reads} | ({"num_depths": native.num_layers} if several else {})
    return ExternalDraft(
        form=f"MTP of a checkpoint, named as in {native.naming.families}",
        kind="mtp",
        settings=settings,
        layer=None,
        weights={},
        num_speculative_tokens=native.num_layers if several else None,
        placed=partial(_placed, native, weights),
    )


def _placed(native: NativeMtp, weights: Weights, own: Shapes) -> Weights:
    """Return the tensors by our names and shapes."""
    like = {name: torch.empty(shape, device="meta") for name, shape in own.items() if name.startswith("layers.")}
    biases = [name for name in weights if "mtp" in name and name.endswith("_proj.bias")]
    zero_biases = {name for name in biases if not weights[name].load().any()}
    places = native.places(like, hidden_first=False, without=zero_biases)
    return {name: _joined(pieces, weights, own[name]) for name, pieces in places.items()}


def _joined(pieces: list[TensorPart], weights: Weights, shape: tuple[int, ...]) -> LazyTensor:
    dtype = weights[pieces[0].key].dtype

    def load() -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for piece in pieces:
            whole[piece.index] = piece.turned(weights[piece.key].load())
        return whole

    return LazyTensor(shape=shape, dtype=dtype, load=load)

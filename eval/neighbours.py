"""Write the table of nearest codes for `decode.lossy`: `python eval/neighbours.py --set codebook=FILE --set vocab_size=N`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.runtime.errors import InputError, first_line
from configs.runtime.files import write_bytes
from configs.runtime.terminal import say
from configs.schema.decoding import NeighboursConfig

if TYPE_CHECKING:
    from torch import Tensor

AT_ONCE = 4096  # codes whose distances to all others are held at a time


def main(config: NeighboursConfig) -> None:
    """Write the token ids of the codes nearest to each token's `[V, k]`, the nearest first; tokens without one name themselves.

    Raises:
        InputError: the codebook cannot be read, does not fit the vocabulary, or has too few codes.
    """
    import torch
    from safetensors.torch import save

    from eval.decoder.lossy import TENSOR

    codebook_CE = _read_codebook(config).double()
    if config.first_id + len(codebook_CE) > config.vocab_size:
        raise InputError(
            f"vocab_size is {config.vocab_size}, and {len(codebook_CE)} codes from token {config.first_id} on do not fit"
        )
    if config.k >= len(codebook_CE):
        raise InputError(f"k must be less than the codebook's {len(codebook_CE)} codes, got {config.k}")
    table_VN = torch.arange(config.vocab_size).unsqueeze(1).repeat(1, config.k)
    for own_P in torch.arange(len(codebook_CE)).split(AT_ONCE):
        distances_PC = torch.cdist(codebook_CE[own_P], codebook_CE)
        distances_PC[torch.arange(len(own_P)), own_P] = float("inf")
        table_VN[config.first_id + own_P] = config.first_id + distances_PC.topk(config.k, largest=False).indices
    write_bytes(Path(config.output), save({TENSOR: table_VN}))
    say(f"the {config.k} nearest of {len(codebook_CE)} codes: {config.output}")


def _read_codebook(config: NeighboursConfig) -> Tensor:
    import numpy as np
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(config.codebook)
    try:
        if path.suffix == ".npy":
            codebook = torch.from_numpy(np.load(path, allow_pickle=False))
        else:
            tensors = load_file(path)
            codebook = tensors[next(iter(tensors)) if config.tensor is None and len(tensors) == 1 else str(config.tensor)]
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise InputError(
            f"codebook: {path} holds no vectors as .npy or safetensors (tensor is {config.tensor}): {first_line(error)}"
        ) from error
    if codebook.ndim != 2 or not codebook.is_floating_point() or not torch.isfinite(codebook).all():
        raise InputError(f"codebook: {path} must hold finite numbers [codes, width], got {tuple(codebook.shape)}")
    return codebook


if __name__ == "__main__":
    sys.exit(run_command(NeighboursConfig, main, description="Write the table of each code's nearest ones."))

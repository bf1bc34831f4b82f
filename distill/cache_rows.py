"""One row of a target cache: what is computed of a hidden state, and how token ids are packed into bytes.

N rows, C rows of one chunk, E width of the target, K kept tokens, V tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from configs.errors import InputError
from distill.cache_format import Layout
from distill.losses import LOG_ZERO
from distill.target import Target
from heads.lm_head import head_logits


@torch.no_grad()
def encode(target: Target, layout: Layout, hidden_NE: Tensor, chunk_size: int) -> dict[str, Tensor]:
    """Return what is kept of rows of hidden states, by name, on the CPU.

    Args:
        target: whose head makes logits of them.
        layout: what is kept.
        hidden_NE: final, normed hidden states.
        chunk_size: rows whose logits live at one time.

    Raises:
        InputError: a value is not finite, or not in the type it is to be kept in.
    """
    if layout.kind == "last_hidden":
        kept = {"hidden": hidden_NE.to(getattr(torch, layout.dtype)).cpu()}
    else:
        chunks = [_top_k(target, layout, hidden_CE) for hidden_CE in hidden_NE.split(chunk_size)]
        kept = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    for name, values in kept.items():
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise InputError(
                f"dtype: the target's {name} is not finite in {layout.dtype}; try bfloat16, or another target.dtype"
            )
    return kept


def pack_ids(token_ids_NK: Tensor, bits: int) -> Tensor:
    """Return token ids as bytes `[N, ceil(K bits / 8)]`, uint8, lowest bit first; each id must be below 2^bits."""
    ids = token_ids_NK.cpu().numpy()
    single = (ids[..., None] >> np.arange(bits)) & 1
    return torch.from_numpy(np.packbits(single.reshape(len(ids), -1).astype(np.uint8), axis=-1, bitorder="little"))


def unpack_ids(packed: Tensor, num_ids: int, bits: int) -> Tensor:
    """Return the token ids `[N, K]`, int64, of packed bytes `[N, ceil(K bits / 8)]`."""
    single = np.unpackbits(packed.numpy(), axis=-1, count=num_ids * bits, bitorder="little")
    return torch.from_numpy(single.reshape(len(packed), num_ids, bits).astype(np.int64) @ (1 << np.arange(bits)))


def _top_k(target: Target, layout: Layout, hidden_CE: Tensor) -> dict[str, Tensor]:
    log_p_CV = head_logits(target.model, hidden_CE)[:, : layout.vocab_size].float().log_softmax(-1)
    log_probs_CK, ids_CK = log_p_CV.topk(layout.width)
    # Summed over what is left, not 1 minus the sum of what is kept: a tail of 1e-6 would drown in rounding.
    log_tail_C = log_p_CV.scatter(-1, ids_CK, -torch.inf).logsumexp(-1)
    dtype = getattr(torch, layout.dtype)
    lowest = max(LOG_ZERO, torch.finfo(dtype).min)
    return {
        "log_probs": log_probs_CK.clamp(min=lowest).to(dtype).cpu(),
        "log_tail": log_tail_C.clamp(min=lowest).to(dtype).cpu(),
        "token_ids": pack_ids(ids_CK, layout.bits),
    }

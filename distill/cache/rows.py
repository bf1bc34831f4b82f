"""The rows of a target cache: computed by a forward of the target over conversations, and token ids packed into bytes.

B batch, T positions, N rows, C rows of one chunk, E width of the target, A taps, K kept tokens, V tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from configs.runtime.errors import InputError
from distill.cache.format import RowLayout, scale_name, tap_name
from distill.dataset.batches import Example, collate
from distill.loss.pairs import LOG_ZERO, normalise
from heads.frozen.hidden_states import read_states
from heads.frozen.loading import Target
from heads.inference.causal_lm import head_logits
from heads.modules.interface import NO_DOCUMENT, Batch, before_labels


def local_rows(
    target: Target, layout: RowLayout, examples: Sequence[Example], *, batch_size: int, chunk_size: int
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield places of examples of similar length, and what is kept of them, by name, one example's rows after the other's.

    `chunk_size` rows of logits live at one time (top_k, taps).

    Raises:
        InputError: a value is not finite, or not in the type it is to be kept in.
    """
    for group in _by_length(examples, batch_size):
        batch = collate([examples[index] for index in group]).to(target.device)
        media = batch.media_inputs(target)
        states = read_states(target.model, batch.input_ids_BT, layout.taps or (), media=media)
        kept_BT = kept_positions(layout, batch)
        taps_ANE = [tap_BTE[kept_BT] for tap_BTE in states.taps_ABTE]
        yield group, encode(target, layout, states.final_BTE[kept_BT], chunk_size, taps_ANE)


def kept_positions(layout: RowLayout, batch: Batch) -> Tensor:
    """Return which positions of a batch have a row, bool `[B, T]`."""
    return batch.document_ids_BT != NO_DOCUMENT if layout.every_position else before_labels(batch)


@torch.no_grad()
def encode(
    target: Target, layout: RowLayout, hidden_NE: Tensor, chunk_size: int, taps_ANE: Sequence[Tensor] = ()
) -> dict[str, Tensor]:
    """Return what is kept of final states, by name, on the CPU; for arguments and errors see `local_rows`.

    `taps_ANE` are the states of the layout's taps, in its order.
    """
    if layout.kind == "last_hidden":
        kept = _states(target, layout, hidden_NE, chunk_size, taps_ANE)
    else:
        chunks = [_top_k(target, layout, hidden_CE) for hidden_CE in hidden_NE.split(chunk_size)]
        kept = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    for name, values in kept.items():
        # 8-bit numbers know no infinity, and torch cannot ask them for it.
        if values.is_floating_point() and not bool((values if values.itemsize > 1 else values.float()).isfinite().all()):
            raise InputError(
                f"dtype: the target's {name} is not finite in {layout.dtype}; try bfloat16, or another target.dtype"
            )
    return kept


def as_kept(layout: RowLayout, log_probs_NK: Tensor, token_ids_NK: Tensor, log_tail_N: Tensor) -> dict[str, Tensor]:
    """Return the most likely tokens and the mass of all others as a top-k cache keeps them, by name, on the CPU."""
    dtype = getattr(torch, layout.dtype)
    lowest = max(LOG_ZERO, torch.finfo(dtype).min)
    return {
        "log_probs": log_probs_NK.clamp(min=lowest).to(dtype).cpu(),
        "log_tail": log_tail_N.clamp(min=lowest).to(dtype).cpu(),
        "token_ids": pack_ids(token_ids_NK, layout.bits),
    }


def pack_ids(token_ids_NK: Tensor, bits: int) -> Tensor:
    """Return token ids as bytes `[N, ceil(K bits / 8)]`, uint8, lowest bit first; each id must be below 2^bits."""
    ids = token_ids_NK.cpu().numpy()
    single = (ids[..., None] >> np.arange(bits)) & 1
    return torch.from_numpy(np.packbits(single.reshape(len(ids), -1).astype(np.uint8), axis=-1, bitorder="little"))


def unpack_ids(packed: Tensor, num_ids: int, bits: int) -> Tensor:
    """Return the token ids `[N, K]`, int64, of packed bytes `[N, ceil(K bits / 8)]`."""
    single = np.unpackbits(packed.numpy(), axis=-1, count=num_ids * bits, bitorder="little")
    return torch.from_numpy(single.reshape(len(packed), num_ids, bits).astype(np.int64) @ (1 << np.arange(bits)))


def _states(
    target: Target, layout: RowLayout, hidden_NE: Tensor, chunk_size: int, taps_ANE: Sequence[Tensor]
) -> dict[str, Tensor]:
    dtype = getattr(torch, layout.dtype)
    kept = {"hidden": hidden_NE.to(torch.bfloat16 if layout.scaled else dtype)}
    if layout.taps is not None:
        for tap, tap_NE in zip(layout.taps, taps_ANE, strict=True):
            if layout.scaled:
                tap_NE, kept[scale_name(tap)] = in_8_bits(tap_NE)
            kept[tap_name(tap)] = tap_NE.to(dtype)
        # Of the state as it will be read: the sum of a rounded one's probabilities is then still 1.
        read_1NE = kept["hidden"].to(hidden_NE.dtype).unsqueeze(0)
        known = normalise(target.model, read_1NE, torch.arange(len(hidden_NE)), chunk_size=chunk_size)
        kept |= {"log_sum": known.log_sum_P.float(), "top1": known.top1_P.int()}
    return {name: values.cpu() for name, values in kept.items()}


def in_8_bits(states_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Return states divided by a scale for each row, by which float8_e4m3fn reaches its largest value, and the scales `[N]`."""
    scale_N = states_NE.float().abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max
    scale_N = scale_N.where(scale_N > 0, torch.ones_like(scale_N))
    return states_NE.float() / scale_N.unsqueeze(1), scale_N


def _top_k(target: Target, layout: RowLayout, hidden_CE: Tensor) -> dict[str, Tensor]:
    log_p_CV = head_logits(target.model, hidden_CE)[:, : layout.vocab_size].float().log_softmax(-1)
    log_probs_CK, ids_CK = log_p_CV.topk(layout.width)
    # Summed over the other tokens, not 1 minus the sum of those kept: a tail of 1e-6 would be lost in rounding.
    log_tail_C = log_p_CV.scatter(-1, ids_CK, -torch.inf).logsumexp(-1)
    return as_kept(layout, log_probs_CK, ids_CK, log_tail_C)


def _by_length(examples: Sequence[Example], batch_size: int) -> Iterator[list[int]]:
    """Yield batches of places in `examples`, those of similar length together, which saves padding."""
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].input_ids))
    for start in range(0, len(order), batch_size):
        yield sorted(order[start : start + batch_size])

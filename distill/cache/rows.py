"""The rows of a target cache, by a forward of the target over conversations or by servers of hidden states.

B batch, T positions, N rows, C rows of one chunk, E width of the target, A taps, K kept tokens, V tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from configs.runtime.errors import InputError
from distill.cache.format import RowLayout, pack_ids, scale_name, tap_name
from distill.dataset.batches import Example, collate
from distill.loss.pairs import LOG_ZERO, normalise
from distill.server.engine import EngineStates
from heads.frozen.hidden_states import read_states
from heads.frozen.loading import Target
from heads.inference.causal_lm import head_logits
from heads.modules.interface import NO_DOCUMENT, before_labels


def local_rows(
    target: Target, layout: RowLayout, examples: Sequence[Example], *, batch_size: int, chunk_size: int
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield places of examples of similar length, and what is kept of them, by name, one example's rows after the other's."""
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].input_ids))
    for start in range(0, len(order), batch_size):
        group = sorted(order[start : start + batch_size])
        batch = collate([examples[index] for index in group]).to(target.device)
        states = read_states(target.model, batch.input_ids_BT, layout.taps or (), media=batch.media_inputs(target))
        kept_BT = batch.document_ids_BT != NO_DOCUMENT if layout.every_position else before_labels(batch)
        taps_ANE = [tap_BTE[kept_BT] for tap_BTE in states.taps_ABTE]
        yield group, encode(target, layout, states.final_BTE[kept_BT], chunk_size, taps_ANE)


def engine_rows(
    target: Target, layout: RowLayout, examples: Sequence[Example], *, chunk_size: int
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Yield each place of an example, and what is kept of it, from servers of hidden states."""
    assert isinstance(target.states_from, EngineStates)
    found = target.states_from.of_each([example.input_ids for example in examples], layout.taps or ())
    for index, (example, states) in enumerate(zip(examples, found, strict=True)):
        kept_T = slice(None) if layout.every_position else slice(example.answer_start - 1, -1)
        taps_ANE = [tap_1TE[0, kept_T] for tap_1TE in states.taps_ABTE]
        yield [index], encode(target, layout, states.final_BTE[0, kept_T], chunk_size, taps_ANE)


@torch.no_grad()
def encode(
    target: Target, layout: RowLayout, hidden_NE: Tensor, chunk_size: int, taps_ANE: Sequence[Tensor] = ()
) -> dict[str, Tensor]:
    """Return what is kept of final states, and of those of the layout's taps, by name, on the CPU."""
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


def _states(
    target: Target, layout: RowLayout, hidden_NE: Tensor, chunk_size: int, taps_ANE: Sequence[Tensor]
) -> dict[str, Tensor]:
    dtype = getattr(torch, layout.dtype)
    kept = {"hidden": hidden_NE.to(torch.bfloat16 if layout.scaled else dtype)}
    if layout.taps is not None:
        for tap, tap_NE in zip(layout.taps, taps_ANE, strict=True):
            if layout.scaled:  # by which float8_e4m3fn reaches its largest value in each row
                scale_N = tap_NE.float().abs().amax(-1) / torch.finfo(dtype).max
                kept[scale_name(tap)] = scale_N = scale_N.where(scale_N > 0, torch.ones_like(scale_N))
                tap_NE = tap_NE.float() / scale_N.unsqueeze(1)
            kept[tap_name(tap)] = tap_NE.to(dtype)
        # Of the state as it will be read: the sum of a rounded one's probabilities is then still 1.
        read_1NE = kept["hidden"].to(hidden_NE.dtype).unsqueeze(0)
        known = normalise(target.model, read_1NE, torch.arange(len(hidden_NE)), chunk_size=chunk_size)
        kept |= {"log_sum": known.log_sum_P.float(), "top1": known.top1_P.int()}
    return {name: values.cpu() for name, values in kept.items()}


def _top_k(target: Target, layout: RowLayout, hidden_CE: Tensor) -> dict[str, Tensor]:
    log_p_CV = head_logits(target.model, hidden_CE)[:, : layout.vocab_size].float().log_softmax(-1)
    log_probs_CK, ids_CK = log_p_CV.topk(layout.width)
    # Summed over the other tokens, not 1 minus the sum of those kept: a tail of 1e-6 would be lost in rounding.
    log_tail_C = log_p_CV.scatter(-1, ids_CK, -torch.inf).logsumexp(-1)
    dtype = getattr(torch, layout.dtype)
    lowest = max(LOG_ZERO, torch.finfo(dtype).min)
    return {
        "log_probs": log_probs_CK.clamp(min=lowest).to(dtype).cpu(),
        "log_tail": log_tail_C.clamp(min=lowest).to(dtype).cpu(),
        "token_ids": pack_ids(ids_CK, layout.bits),
    }

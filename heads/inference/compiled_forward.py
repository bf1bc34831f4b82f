"""A forward compiled by `torch.compile` for a few fixed shapes, with CUDA graphs where the device has them.

The tokens of a forward are padded to one of `WIDTHS` by repeating the last, the cache has one of a few sizes and is read whole
behind a mask, and what fits no width (a prompt) runs uncompiled. Each width, batch size, cache size and set of taps is a graph
of its own, so this is for long runs at one batch size.
B batch, T new tokens, W tokens of a graph, S cache length, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from heads.device import has_graphs
from heads.inference.kv_cache import RowCache
from heads.inference.lean_forward import make_lean
from heads.inference.model_checks import check_rolls_back
from heads.inference.runner import DecodingForward, Masks, TransformersForward, runner_of

log = logging.getLogger("draftsmith")

WIDTHS = (1, 2, 4, 8, 16, 32)  # tokens of a row in one forward; more run uncompiled
SMALLEST_CACHE = 256  # positions a row; larger caches double
MEMORY_SHARE = 0.5  # of the free memory that packed weights, a copy, may take
MAX_GRAPHS = 16  # of one model; further shapes run uncompiled


def make_compiled(model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Let decoding run `model` by a compiled forward from now on, the lean one where its family has that.

    Its weights must not change afterwards. Layers that have states, or count columns of the cache, are refused.
    """
    runner = runner_of(model)
    check_rolls_back(model)
    # MPT takes the length of the cache as a number, so that each round would be a graph of its own.
    if runner.mixers or "batches" in runner.refused or model.config.model_type == "mpt":
        raise InputError(
            f"{type(model).__name__} has recurrent layers, or counts columns of the cache, which cannot be compiled; set "
            "target.forward to transformers"
        )
    try:
        make_lean(model)
    except InputError as error:
        log.info("transformers' forward is compiled: %s", error)
    runner.forward = CompiledForward(runner.forward or TransformersForward(model), model.device, backend)


def make_fastest(model: PreTrainedModel) -> None:
    """Let decoding run `model` by the fastest forward that its family, its device and the memory have."""
    try:
        if has_graphs(model.device):
            make_compiled(model)
        elif model.get_memory_footprint() < MEMORY_SHARE * psutil.virtual_memory().available:
            make_lean(model)
    except InputError as error:
        log.info("%s", error)
    log.info("target.forward auto: %s", forward_name(model))


def forward_name(model: PreTrainedModel) -> str:
    """Return what decoding runs `model` by, as `target.forward` has it."""
    forward = runner_of(model).forward
    return "transformers" if forward is None else "compiled" if isinstance(forward, CompiledForward) else "lean"


def run_alike(model: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give `model` the kind of forward that `target` has; raises as `make_lean` does."""
    forward = runner_of(target).forward
    if isinstance(forward, CompiledForward):
        make_compiled(model)
    elif forward is not None:
        make_lean(model)


class CompiledForward:
    """Another forward, run as graphs of fixed shapes."""

    def __init__(self, inner: DecodingForward, device: torch.device, backend: str | Callable[..., Any]) -> None:
        self.inner, self.backend = inner, backend
        self._graphs: dict[tuple[Any, ...], Callable[..., Tensor]] = {}
        self._has_graphs = has_graphs(device)
        if self._has_graphs:  # or each graph would copy them before it runs
            for weight in inner.weights:
                torch._dynamo.mark_static_address(weight)
        self._taps: tuple[int, ...] = ()
        self._seen: dict[int, Tensor] = {}

    def watch(self, taps: Sequence[int], seen: dict[int, Tensor]) -> None:
        self._taps, self._seen = tuple(taps), seen
        self.inner.watch(taps, seen)

    @property
    def weights(self) -> Iterable[Tensor]:
        return self.inner.weights

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        return self.inner.logits(hidden_BTD)

    def cache_size(self, capacity: int) -> int:
        size = SMALLEST_CACHE
        while size < capacity + WIDTHS[-1]:
            size *= 2
        return size

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor, masks: Masks, cache: RowCache) -> Tensor:
        T = ids_BT.shape[1]
        graph = self._graph_for(ids_BT, masks, cache)
        if graph is None:
            return self.inner.hidden(ids_BT, positions_BT, masks, cache)
        run, W = graph
        slots = cache.end
        cache.widen(W)
        ids_BW = _padded(ids_BT, W)
        if isinstance(masks, dict):
            masks = {kind: _over_slots(mask, slots, cache.capacity, ids_BW) for kind, mask in masks.items()}
        else:
            masks = _over_slots(masks, slots, cache.capacity, ids_BW)
        if self._has_graphs:
            cache.mark_static()
        hidden_BWD = run(ids_BW, _padded(positions_BT, W), masks, cache)
        for tap in self._taps:
            self._seen[tap] = self._own(self._seen[tap][:, :T])
        return self._own(hidden_BWD[:, :T])

    def _graph_for(self, ids_BT: Tensor, masks: Masks, cache: RowCache) -> tuple[Callable[..., Tensor], int] | None:
        """Return the compiled function for this forward and its width, None where it is to run uncompiled."""
        B, T = ids_BT.shape
        starts_text = masks is None and T != 1
        W = next((width for width in WIDTHS if width >= T), None)
        if starts_text or W is None or not cache.is_filled or not cache.has_room(W):
            return None
        if self._taps and isinstance(self.inner, TransformersForward):
            return None
        key = (B, W, cache.capacity, self._taps, frozenset(masks) if isinstance(masks, dict) else None)
        if key not in self._graphs and len(self._graphs) == MAX_GRAPHS:
            return None
        if key not in self._graphs:
            log.info("compiling the forward of %d x %d tokens, cache %d", B, W, cache.capacity)
            if len(self._graphs) == MAX_GRAPHS - 1:
                log.warning("%d graphs are compiled, the most there may be: further shapes run uncompiled", MAX_GRAPHS)
            mode = "reduce-overhead" if self._has_graphs else None
            options: dict[str, Any] = {"dynamic": False, "fullgraph": True, "mode": mode, "backend": self.backend}
            options |= {"isolate_recompiles": True, "recompile_limit": 4}  # missing in the type stubs
            self._graphs[key] = torch.compile(self.inner.hidden, **options)  # at its first call, with guards of its own
        return self._graphs[key], W

    def _own(self, state: Tensor) -> Tensor:
        """Return a state that the next CUDA graph does not overwrite."""
        return state.clone() if self._has_graphs else state


def _padded(values_BT: Tensor, W: int) -> Tensor:
    """Return values padded to `[B, W]` by repeating the last column; contiguous, since strides are guarded too."""
    T = values_BT.shape[1]
    return values_BT.contiguous() if T == W else torch.cat([values_BT, values_BT[:, -1:].expand(-1, W - T)], 1)


def _over_slots(mask: Tensor | None, slots: int, capacity: int, like_BW: Tensor) -> Tensor:
    """Return a mask `[B, 1, W, S]` over all slots of the cache; padding sees what the last token sees."""
    B, W = like_BW.shape
    if mask is None:  # one token that sees every slot
        return (torch.arange(capacity, device=like_BW.device) < slots).expand(B, 1, W, capacity).contiguous()
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    mask = functional.pad(mask, (0, capacity - mask.shape[-1]), value=hidden)
    last = mask[:, :, -1:].expand(-1, -1, W - mask.shape[2], -1)
    return torch.cat([mask, last], 2).expand(B, -1, -1, -1).contiguous()

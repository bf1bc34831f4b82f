"""A training step of a recipe's models on torch's meta device, without weights or data: its FLOPs and what it keeps in memory.

The draft's own training forward and backward run, so that no family has to say what it computes. Token ids and masks are real
tensors on the CPU, as they decide which rows are trained; all that depends on a weight has a shape only. FLOPs are counted as
by `eval.cost.operation_counter`: attention counts all pairs computed, masked or not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from configs.schema.commands.planning import PlanConfig
from distill.loss.head_objective import shared_places
from eval.cost.operation_counter import WorkCounter
from heads.frozen.hidden_states import TargetStates
from heads.inference.runner import backbone
from heads.modules.interface import Batch
from train.plan.models import PlannedModels

INDEXING = ("aten::index", "aten::index_select")  # they need an index's values for the shape of what they return
PRODUCTS = (linear, scaled_dot_product_attention, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.einsum)
FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, kw_only=True)
class DraftStep:
    """What a step takes of the draft, all a token of the batch; its output head is apart."""

    forward_flops: float
    backward_flops: float
    judged_rows: float  # that become logits of the draft's
    target_rows: float  # and of the target's, which depths share
    kept_bytes: float  # of what the forward keeps for the backward


def draft_step(
    config: PlanConfig,
    models: PlannedModels,
    *,
    length: float,
    label_share: float,
    rows: int = 1,
    work: Callable[[], WorkCounter] = WorkCounter,
) -> DraftStep:
    """Run a step of the draft over rows of `length` tokens, the labels at their ends, and return what it takes.

    `work` makes what counts the operations of the forward, and then of the backward.
    """
    T = max(2, round(length))
    draft = models.draft
    ids_BT, positions_BT = _rows(rows, T)
    mask_BT = positions_BT >= T - round(label_share * T)
    casts = _Casts(enabled=config.schedule.mixed_precision != "no")
    with torch.random.fork_rng([]), casts, _MixedDevices():
        torch.manual_seed(0)  # some families draw which rows they train
        with work() as forward, _kept_bytes(draft, casts) as kept:
            if isinstance(draft, PreTrainedModel):
                states_BTE = _run(draft, ids_BT, positions_BT, use_cache=False).last_hidden_state
                hidden, places = [states_BTE[:, :-1][mask_BT[:, 1:]]], []
            else:
                width = models.target.config.get_text_config().hidden_size
                state_BTE = torch.empty(rows, T, width, dtype=models.target.dtype, device="meta")
                states = TargetStates(final_BTE=state_BTE, taps_ABTE=(state_BTE,) * len(models.taps or ()))
                batch = Batch(ids_BT, mask_BT, positions_BT, torch.zeros_like(ids_BT), ids_BT[:, :1])
                depths = draft(batch, states)
                hidden = [depth.hidden_ND for depth in depths]
                places = [depth.target_places_N for depth in depths]
        with work() as backward:
            torch.stack([each.sum() for each in hidden]).sum().backward()
    shared_P, num_judged, num_tokens = shared_places(places), sum(map(len, hidden)), rows * T
    return DraftStep(
        forward_flops=forward.flops / num_tokens,
        backward_flops=backward.flops / num_tokens,
        judged_rows=num_judged / num_tokens,
        target_rows=(num_judged if shared_P is None else len(shared_P)) / num_tokens,
        kept_bytes=sum(kept.values()) / num_tokens,
    )


@torch.no_grad()
def forward_flops(model: PreTrainedModel, length: float, rows: int = 1, work: Callable[[], WorkCounter] = WorkCounter) -> float:
    """Return the FLOPs a token of a causal LM's forward without its head, over rows of `length` tokens; `work` counts them."""
    T = max(1, round(length))
    with _Casts(enabled=False), _MixedDevices(), work() as counter:
        _run(model, *_rows(rows, T), use_cache=False)
    return counter.flops / (rows * T)


@torch.no_grad()
def cached_bytes(model: PreTrainedModel) -> tuple[int, int]:
    """Return the bytes that decoding keeps of a row of text: of each of its tokens, and whatever its length (states)."""

    def after(length: int) -> int:
        with _Casts(enabled=False), _MixedDevices():
            output = _run(model, *_rows(1, length), use_cache=True)
        cache = output.get("past_key_values", output.get("cache_params"))  # the latter: Mamba
        tensors = [each for layer in getattr(cache, "layers", ()) for each in tree_leaves(list(vars(layer).values()))]
        return sum(each.nbytes for each in tensors if isinstance(each, Tensor) and each.is_floating_point())  # not counters

    one, two = after(1), after(2)
    return two - one, 2 * one - two


def _rows(rows: int, length: int) -> tuple[Tensor, Tensor]:
    positions_BT = torch.arange(length).repeat(rows, 1)
    return torch.zeros_like(positions_BT), positions_BT


def _run(model: PreTrainedModel, ids_BT: Tensor, positions_BT: Tensor, *, use_cache: bool) -> Any:
    part = backbone(model)
    given = {"position_ids": positions_BT} if "position_ids" in inspect.signature(part.forward).parameters else {}
    return part(input_ids=ids_BT, use_cache=use_cache, **given)


@contextmanager
def _kept_bytes(draft: nn.Module, casts: _Casts) -> Iterator[dict[int, int]]:
    """Collect the bytes of each storage that a forward keeps for its backward, weights apart."""
    kept: dict[int, int] = {}
    alive = []  # a storage that is freed would give its number to another one

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        alive.append(storage)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept
    for weight in (*draft.parameters(), *casts.weights.values()):
        kept.pop(weight.untyped_storage()._cdata, None)


class _MixedDevices(TorchDispatchMode):
    """Moves an operation's other operands to the meta device where one of them is there."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operands = args, dict(kwargs or {})
        tensors = [each for each in tree_leaves(operands) if isinstance(each, Tensor)]
        if func._schema.name not in INDEXING and any(each.is_meta for each in tensors):
            operands = tree_map_only(Tensor, lambda each: each.to("meta"), operands)
        if func._schema.name == "aten::_grouped_mm":  # of experts; without data in bfloat16 only
            dtype = tensors[0].dtype
            operands = tree_map_only(Tensor, lambda each: each.bfloat16() if each.dtype == dtype else each, operands)
            return func(*operands[0], **operands[1]).to(dtype)
        return func(*operands[0], **operands[1])


class _Casts(TorchFunctionMode):
    """Runs products in bfloat16 as autocast does, and attention by a fused kernel: torch does neither for the meta device."""

    def __init__(self, *, enabled: bool) -> None:
        super().__init__()
        self.enabled = enabled
        self.weights: dict[Tensor, Tensor] = {}  # cast once for all their uses

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operands = args, dict(kwargs or {})
        if self.enabled and func in PRODUCTS:
            operands = tree_map_only(Tensor, self._cast, operands)
        return (_attend if func is scaled_dot_product_attention else func)(*operands[0], **operands[1])

    def _cast(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not isinstance(tensor, nn.Parameter):
            return tensor.bfloat16()
        if tensor not in self.weights:
            self.weights[tensor] = tensor.bfloat16()
        return self.weights[tensor]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    attended: Tensor = FUSED_ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return attended[..., : value.shape[-1]]  # without data the kernel takes values for as wide as keys; those of MLA are not

"""What a training step takes on a GPU that is not there: a roofline over the real code, run without weights.

A launch takes as long as its FLOPs, its bytes or the launch itself do, whichever is longest. Rates are the maker's, times
shares that large kernels reach (`REACHED`); both are assumptions. What torch compiles on CUDA counts as the kernel that it
becomes: the attention of a head's training, and the passes over a chunk's logits. What processes send each other is left out.
B rows, N heads, X queries, T positions, H head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from train.plan.step import draft_step, forward_flops

from configs.runtime.loading import load_config
from configs.schema.commands.planning import PlanHeadsConfig, Preset
from heads.families import eagle3
from scripts.lab.counts.launches import is_launch
from scripts.lab.counts.operation_counter import ATTENTION, PRODUCTS, WorkCounter
from train.plan.models import count, draft_columns, plan_models
from train.plan.plan import OPTIMIZER_BYTES_MOVED, Workload, flops_of

REACHED: Mapping[str, float] = {"products": 0.7, "attention": 0.5, "memory": 0.8}  # of the maker's rates
LAUNCH_SECONDS = 5e-6
SETTINGS = ("target.name=configs/plan/llama_8b", "head.num_depths=4", "schedule.batch_size=8")
GATHERING = ("aten::embedding", "aten::index", "aten::gather", "aten::index_select")
BACKWARD_OF_ATTENTION = 2.5  # times its forward: five products for two, scores computed again


class Roofline(WorkCounter):
    """Adds up the seconds of the launches while it is entered."""

    def __init__(self, machine: Preset) -> None:
        super().__init__()
        self.machine, self.seconds = machine, 0.0

    def add(self, *, flops: float = 0.0, num_bytes: float = 0.0, reached: float = REACHED["products"]) -> None:
        """Add a launch."""
        computed = flops / (reached * self.machine.tflops * 1e12)
        moved = num_bytes / (REACHED["memory"] * self.machine.memory_gb_per_second * 1e9)
        self.seconds += max(computed, moved, LAUNCH_SECONDS)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if not is_launch(func, args, made):
            return made
        name, flops = func._schema.name, 0.0
        attends = name.removesuffix("_backward") in ATTENTION
        if name in PRODUCTS:
            flops = PRODUCTS[name][0](args) / (2 if attends else 1)  # causal: half of the pairs
        tensors = [each for each in tree_leaves((args, kwargs, made)) if isinstance(each, Tensor)]
        of_output = 2 * made.nbytes if name in GATHERING else 0  # of the rows that are read, and written
        moved = of_output or sum(each.nbytes for each in tensors)
        self.add(flops=flops, num_bytes=moved, reached=REACHED["attention" if attends else "products"])
        return made

    def read_ranges(self, q_BNXH: Tensor, k_BMTH: Tensor, v_BMTH: Tensor, ranges: Any) -> tuple[Tensor, Tensor]:
        """Stand in for `heads.modules.attention.read_ranges`, as the one kernel that it is on CUDA."""
        mixed_BNXH, log_sums_BNX = _Attention.apply(self, q_BNXH.to(v_BMTH.dtype), k_BMTH.to(v_BMTH.dtype), v_BMTH)
        return mixed_BNXH, log_sums_BNX


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, roofline: Roofline, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.roofline, ctx.flops = roofline, 4 * q.numel() * k.shape[2] / 2
        roofline.add(flops=ctx.flops, num_bytes=2 * q.nbytes + k.nbytes + v.nbytes, reached=REACHED["attention"])
        return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        moved = 4 * q.nbytes + 2 * (k.nbytes + v.nbytes)
        ctx.roofline.add(flops=BACKWARD_OF_ATTENTION * ctx.flops, num_bytes=moved, reached=REACHED["attention"])
        return None, *map(torch.empty_like, (q, k, v))


def estimate_step(loss_bytes_a_logit: float, sum_bytes_a_logit: float) -> dict[str, float]:
    """Return the seconds of a step of EAGLE-3 on Llama 3.1 8B, online on an H100, by part, and the share of the peak (MFU).

    `loss_bytes_a_logit` are those of comparing a chunk, `sum_bytes_a_logit` those of the sum over the target's vocabulary.
    """
    config = load_config(PlanHeadsConfig, "configs/plan/eagle3_70b.yaml", SETTINGS)
    models = plan_models(config)
    machine, rows, length = config.hardware.machine, config.schedule.batch_size, config.workload.mean_tokens
    label_share = config.workload.label_share
    assert length is not None
    assert label_share is not None
    target, draft = Roofline(machine), Roofline(machine)
    forward_flops(models.target, length, rows, lambda: target)
    with mock.patch.object(eagle3, "read_ranges", draft.read_ranges):
        step = draft_step(config, models, length=length, label_share=label_share, rows=rows, work=lambda: draft)
    tokens = length * rows
    flops = flops_of(config, models, Workload(num_conversations=1, mean_tokens=length, label_share=label_share))
    compared = step.judged_rows * tokens * draft_columns(config, models)
    summed = label_share * tokens * models.target.config.get_text_config().vocab_size
    products = (flops.target_logits + flops.draft_logits) * tokens / (REACHED["products"] * machine.tflops * 1e12)
    bandwidth = REACHED["memory"] * machine.memory_gb_per_second * 1e9
    seconds = {
        "target": target.seconds,
        "draft": draft.seconds,
        "loss": products + (compared * loss_bytes_a_logit + summed * sum_bytes_a_logit) / bandwidth,
        "optimizer": count(models.draft, trained=True) * OPTIMIZER_BYTES_MOVED / bandwidth,
    }
    return {**seconds, "mfu": flops.total * tokens / sum(seconds.values()) / (machine.tflops * 1e12)}

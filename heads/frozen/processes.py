"""Joining the processes that `accelerate launch` started, and a target split over groups of them.

Each process reads its share of every block's weights, and torch's FSDP2 gathers a block's for as long as it runs. Embedding,
final norm and output head are whole in every process: heads and losses read them, and not all equally often. Every forward must
be run by all of a group. They decode the same prompts in lockstep (random numbers are a function of request and position), and
in training each brings a batch of its own.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from torch import nn
from torch.distributed import DistError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from configs.runtime.errors import ConfigError, InputError, RunFailed, first_line
from configs.schema.target import TargetConfig
from heads.device import choose_device
from heads.frozen.hidden_states import blocks
from heads.frozen.placement import UNSPLIT, blocks_name, make_skeleton

Part = TypeVar("Part")

WHOLE, SHARED = "replicate", "shared_block"  # styles of transformers' plans: its own, and the one registered below


def join_processes(target: TargetConfig, *, timeout_seconds: int | None = None) -> PartialState:
    """Return this process's place among those that share the work; `timeout_seconds` None: torch's own limit for waiting."""
    settings: dict[str, Any] = {} if timeout_seconds is None else {"timeout": timedelta(seconds=timeout_seconds)}
    on_cpu = choose_device(target.device).type == "cpu"
    if on_cpu:  # DeepSpeed, which accelerate imports wherever it is installed, would warn of what it cannot detect
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    by_deepspeed = on_cpu and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    if by_deepspeed:
        # accelerate has DeepSpeed for accelerators only; told the transport, it takes the CPU for one.
        settings |= {"backend": "gloo"}
        on_cpu = False
    # Without `cpu` accelerate looks for accelerators only, and finds one process where there are several on a CPU.
    try:
        with _without_compiling() if by_deepspeed else nullcontext():
            state = PartialState(cpu=on_cpu, **settings)
    except ImportError as error:
        raise InputError(f"the processes were launched for DeepSpeed, which is not installed: {first_line(error)}") from error
    num_launched = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != num_launched:
        raise RuntimeError(f"{num_launched} processes were launched, but accelerate sees {state.num_processes}")
    return state


@contextmanager
def _without_compiling() -> Iterator[None]:
    """Let DeepSpeed on a CPU do without operators of its own: a process killed while it compiles one leaves a lock."""
    if find_spec("deepspeed") is None:
        yield
        return
    import deepspeed.ops

    found = vars(deepspeed.ops).get("__compatible_ops__")  # made at first use
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    try:
        yield
    finally:
        if found is None:
            del deepspeed.ops.__compatible_ops__
        else:
            deepspeed.ops.__compatible_ops__ = found


def wait_patiently(seconds: int) -> None:
    """Return once all processes have come here, or fail after `seconds`; gloo keeps no device busy meanwhile."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(_patient_group(dist.group.WORLD, seconds))


@cache
def _patient_group(everyone: Any, seconds: int) -> Any:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


@contextmanager
def naming_lost_processes() -> Iterator[None]:
    """Say in a `RunFailed` that another process has ended or does not answer: the transport's own message does not."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, DistError) or "/gloo/" in str(error)):  # gloo raises plain RuntimeErrors
            raise
        raise RunFailed(
            f"another process of this run has ended or does not answer ({first_line(error)}); its own log says why. Nothing "
            "on disk is lost: rerun the same command to resume"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of the target's work is this process's: `number` of `count`. Of a group all do the same, and one writes it."""

    number: int
    count: int
    writes: bool

    def gather(self, own: Sequence[Part]) -> list[Part]:
        """Return what those that write hand in, in the order of their parts."""
        found: list[Part] = gather_object(list(own) if self.writes else [])
        return found


def share_of(group: Share | None, state: PartialState) -> Share:
    """Return this process's share: that of its group, or, where each process has a target of its own (None), its own."""
    own = Share(number=state.process_index, count=state.num_processes, writes=True)
    return own if group is None else group


@dataclass
class _OneGroup(DistributedConfig):
    """transformers' settings for groups that know nothing of each other: it would hold what they share in parts as well."""

    @property
    def dp_size(self) -> int:
        return 1


class _SharedBlock(TensorParallelLayer):
    """A block whose weights each process holds a share of, and all of while it runs."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        return module


ALL_PARALLEL_STYLES.register(SHARED, cast(Any, _SharedBlock()))


def split_arguments(path: Path, config: TargetConfig, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` by which this process reads its part of the target in a folder."""
    count = _num_groups(config)
    skeleton = make_skeleton(path, config)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type != device.type:  # transformers takes it, whatever the config says
        raise ConfigError(
            f"target.shards: shares run on {accelerator.type} where there is one, got device {device.type}; hide it from the "
            "processes (CUDA_VISIBLE_DEVICES='')"
        )
    plan = dict.fromkeys(skeleton.tp_plan, WHOLE) | {f"{blocks_name(skeleton)}.*": SHARED}
    return {"distributed_config": _OneGroup(tp_size=config.shards, dp_replicate_size=count, tp_plan=plan)}


def join_group(model: PreTrainedModel, config: TargetConfig) -> Share:
    """Return the share of this process's group, and make its part of the target, `model`, ready to run."""
    size, count = config.shards, _num_groups(config)
    for part in (model.config, model.config.get_text_config()):
        part.__dict__.pop("distributed_config", None)  # drafts are made of this config
    with torch.device("meta"):
        unsplit = blocks(type(model)(model.config))
    layers = blocks(model)
    for block, unsplit_block in zip(layers, unsplit, strict=True):
        block.__dict__[UNSPLIT] = unsplit_block
    inside = {module for block in layers for module in block.modules()}
    for module in model.modules():
        if module not in inside and getattr(module, "_is_hooked", False):  # what stays whole needs no hook
            for name in ("forward", "_is_hooked"):
                module.__dict__.pop(name, None)
    rank = dist.get_rank()
    return Share(number=rank // size, count=count, writes=rank % size == 0)


def _num_groups(config: TargetConfig) -> int:
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes % config.shards:
        raise ConfigError(
            f"target.shards: {config.shards} makes groups of so many processes, which do not divide the {num_processes} of "
            f"this run; start a multiple of {config.shards}, by accelerate launch or torchrun"
        )
    return num_processes // config.shards

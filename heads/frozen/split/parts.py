"""The part of a target that a process of a group holds: how it is read, and how the blocks run.

transformers splits tensors and experts while it reads the weights; torch's FSDP2 gathers a block's for as long as it runs; of a
pipeline each process reads its own blocks. Embedding, final norm and output head are whole in every process: heads and losses
read them, and not all processes equally often.
B batch, T positions, E width of the target.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from configs.runtime.errors import ConfigError, InputError
from configs.schema.target import ParallelConfig, TargetConfig
from heads.frozen.hidden_states import blocks
from heads.frozen.placement import DISK, UNSPLIT, blocks_name, make_skeleton, place_parts
from heads.frozen.split.groups import TargetGroup

WHOLE, SHARED = "replicate", "shared_block"  # styles of transformers' plans: its own, and the one registered below
EXPERT_WEIGHTS = "grouped_gemm"  # the style of weights whose first dimension counts experts


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
    """Return the arguments of `from_pretrained` by which this process reads its part of the target in a folder.

    Raises:
        ConfigError: the groups do not divide the number of processes, or their size not what they split.
        InputError: transformers has no plan by which the family could be split so.
    """
    parallel, count = _parallel(config), _count_groups(config)
    skeleton = make_skeleton(path, config)
    prefix = blocks_name(skeleton)
    if parallel.kind == "pipeline":
        return _stage_arguments(path, config, device, parallel.size, prefix, len(blocks(skeleton)))
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type != device.type:  # transformers takes it, whatever the config says
        raise ConfigError(
            f"target.parallel: {parallel.kind} runs on {accelerator.type} where there is one, got device {device.type}; hide "
            "it from the processes (CUDA_VISIBLE_DEVICES='')"
        )
    if parallel.kind == "tensor":
        _check_tensors(skeleton, parallel.size, prefix)
    elif parallel.kind == "expert":
        _check_experts(skeleton, parallel.size)
    whole = [rule for rule in skeleton.tp_plan if parallel.kind != "tensor" or not rule.startswith(f"{prefix}.")]
    plan = dict.fromkeys(whole, WHOLE) | ({f"{prefix}.*": SHARED} if parallel.kind == "shard" else {})
    settings = _OneGroup(
        tp_size=parallel.size,
        dp_replicate_size=count,
        tp_plan=plan or dict.fromkeys([prefix], WHOLE),
        ep_size=parallel.expert,
    )
    return {"distributed_config": settings}


def join_group(model: PreTrainedModel, config: TargetConfig, device: torch.device) -> TargetGroup:
    """Return the group of this process, whose part of the target is `model`, and make that ready to run."""
    parallel, count = _parallel(config), _count_groups(config)
    mesh = init_device_mesh(device.type, (count, parallel.size), mesh_dim_names=("groups", "members"))
    place = dist.get_rank()
    group = TargetGroup(
        number=place // parallel.size,
        count=count,
        rank=place % parallel.size,
        size=parallel.size,
        same_inputs=parallel.kind != "shard",
        processes=mesh["members"].get_group(),
    )
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
    if parallel.kind == "pipeline":
        for number, block in enumerate(layers):
            _run_in_stages(block, group, _stage_of(number, len(layers), group.size))
    return group


def _parallel(config: TargetConfig) -> ParallelConfig:
    assert config.parallel is not None
    return config.parallel


def _count_groups(config: TargetConfig) -> int:
    size, num_processes = _parallel(config).size, int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes % size:
        raise ConfigError(
            f"target.parallel: {_parallel(config).kind} {size} makes groups of {size} processes, which do not divide the "
            f"{num_processes} of this run; start a multiple of {size}, by accelerate launch or torchrun"
        )
    return num_processes // size


def _check_tensors(skeleton: PreTrainedModel, size: int, prefix: str) -> None:
    name, config = type(skeleton).__name__, skeleton.config.get_text_config()
    if not any(rule.startswith(f"{prefix}.") for rule in skeleton.tp_plan):
        raise InputError(
            f"target.parallel: transformers has no plan for tensor parallelism of {name}; give shard {size} or pipeline {size}"
        )
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if heads is not None and heads % size:
            raise ConfigError(
                f"target.parallel: tensor {size} does not divide the {what} of {name}, {heads}; give a divisor, or "
                f"shard {size} or pipeline {size}"
            )


def _check_experts(skeleton: PreTrainedModel, size: int) -> None:
    name, plan = type(skeleton).__name__, skeleton.ep_plan
    if EXPERT_WEIGHTS not in plan.values():
        raise InputError(
            f"target.parallel: transformers has no plan for expert parallelism of {name}; give tensor, shard or pipeline {size}"
        )
    counts = [getattr(module, "num_experts", None) for module in skeleton.modules() if list(module.parameters(recurse=False))]
    for count in {count for count in counts if isinstance(count, int)}:
        if count % size:
            raise ConfigError(
                f"target.parallel: expert {size} does not divide the {count} experts of {name}; give a divisor, or "
                f"shard {size} or pipeline {size}"
            )


def _stage_of(number: int, num_blocks: int, num_stages: int) -> int:
    """Return which stage holds a block; stages differ by one block at most."""
    return number * num_stages // num_blocks


def _stage_arguments(
    path: Path, config: TargetConfig, device: torch.device, num_stages: int, prefix: str, num_blocks: int
) -> dict[str, Any]:
    """Return the arguments by which only this stage's blocks are read; the others are on the disk, where they are never run."""
    if num_blocks < num_stages:
        raise ConfigError(f"target.parallel: pipeline {num_stages} has more stages than the target has blocks, {num_blocks}")
    rank = dist.get_rank()
    others = [number for number in range(num_blocks) if _stage_of(number, num_blocks, num_stages) != rank % num_stages]
    by_hand = config.model_copy(update={"device_map": {f"{prefix}.{number}": DISK for number in others}})
    folder = None if config.offload_folder is None else str(Path(config.offload_folder) / str(rank))
    return {"device_map": place_parts(path, by_hand, device), "offload_folder": folder}


def _run_in_stages(block: nn.Module, group: TargetGroup, stage: int) -> None:
    """Let a block run in its stage only, and hand its state to all processes of the group: each may be tapped.

    B * T * width numbers a block, to every process of the group.
    """
    source, run = group.member(stage), block.forward

    def send(*args: Any, **kwargs: Any) -> Any:
        state_BTE = run(*args, **kwargs)
        if not isinstance(state_BTE, Tensor):
            raise InputError(
                f"target.parallel: a {type(block).__name__} returns more than a state, and pipeline hands on states only; give "
                f"shard {group.size}"
            )
        state_BTE = state_BTE.contiguous()
        dist.broadcast(state_BTE, source, group=group.processes)
        return state_BTE

    def receive(*args: Any, **kwargs: Any) -> Tensor:
        state_BTE = torch.empty_like(args[0] if args else kwargs["hidden_states"])
        dist.broadcast(state_BTE, source, group=group.processes)
        return state_BTE

    block.forward = send if stage == group.rank else receive


def held_bytes(model: PreTrainedModel) -> Mapping[str, int]:
    """Return the bytes of the weights that this process holds, and of all of them."""
    weights = list(model.parameters())
    local = [getattr(each, "_local_tensor", each) for each in weights]
    return {
        "held": sum(each.numel() * each.element_size() for each in local if not each.is_meta),
        "whole": sum(each.numel() * each.element_size() for each in weights),
    }

"""The optimiser of a run, how its processes hold the weights that they train, and how the unsharded weights are obtained.

`TrainingEngine` replicates them (one process, or several under DDP). `Fsdp2Engine` shards them by torch's `fully_shard`, also
on a CPU, where accelerate does not offer it. `DeepSpeedEngine` is ZeRO: stages 1 and 2 shard optimiser state and gradients,
stage 3 the weights as well. accelerate's config or environment says which. Decoding and artifacts need unsharded weights: where
they are sharded, they are loaded into a copy of the module made beforehand. Not supported: FSDP 1, Megatron, fp16, and ZeRO
stage 3 for heads, which read weights outside of the modules that own them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from configs.runtime.errors import ConfigError
from configs.schema.training import OptimizerConfig, ScheduleConfig
from heads.device import has_fused_optimizers
from train.loop.lineage import FSDP2, REPLICATED, engine_name

if TYPE_CHECKING:
    from train.loop.loop import Task

log = logging.getLogger("draftsmith")

WEIGHTS_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.bin"
MakeOptimizer = Callable[[nn.Module], tuple[torch.optim.Optimizer, LambdaLR]]


def make_optimizer(module: nn.Module, config: OptimizerConfig, num_steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return AdamW over the trainable parameters, no decay on vectors, and linear warm-up with a cosine to `final_share`."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = has_fused_optimizers(trainable[0].device) or None
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused)
    warmup = max(1, round(config.warmup_share * num_steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * done))

    return optimizer, LambdaLR(optimizer, factor)


def choose_engine(accelerator: Accelerator, schedule: ScheduleConfig, optimizer: OptimizerConfig) -> TrainingEngine:
    """Return the engine that this run was launched with."""
    name = engine_name(accelerator)
    if name == REPLICATED:
        return TrainingEngine(accelerator)
    return Fsdp2Engine(accelerator) if name == FSDP2 else DeepSpeedEngine(accelerator, schedule, optimizer)


class TrainingEngine:
    """The part of the training loop that depends on how weights are held; this one replicates them in each process."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def prepare(self, task: Task, make: MakeOptimizer) -> tuple[nn.Module, Any, LambdaLR]:
        """Return the task's module as it is to be called, its optimiser, and the schedule of the learning rate."""
        task.module.to(self.accelerator.device)  # on some devices the parameters are others afterwards
        optimizer, scheduler = make(task.module)
        module, optimizer = self.accelerator.prepare(task.module, optimizer)
        if isinstance(module, DistributedDataParallel):
            # No draft has buffers that change; sent at every forward, they would let all wait for the slowest there as well.
            module.forward_sync_buffers = False
        return module, optimizer, scheduler

    def micro_batch(self, module: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch; only in the last one of a step are gradients reduced over the processes."""
        return nullcontext() if last else self.accelerator.no_sync(module)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients; DeepSpeed takes the optimiser's step with the last micro-batch."""
        self.accelerator.backward(loss)

    def clip(self, module: nn.Module, max_norm: float) -> Tensor | float | None:
        """Clip the gradients by their norm over all processes; return that norm before clipping."""
        return self.accelerator.clip_grad_norm_(module.parameters(), max_norm)

    def full_weights(self, module: nn.Module) -> AbstractContextManager[nn.Module]:
        """Collective: yield the unwrapped module with gathered weights in every process, read-only."""
        # accelerate's own unwrapping would import DeepSpeed wherever that is installed: seconds, in each process.
        return nullcontext(cast(nn.Module, module.module) if isinstance(module, DistributedDataParallel) else module)


class Fsdp2Engine(TrainingEngine):
    """Each process holds its share of every weight, one alone all of it; a unit of the module is unsharded while it runs.

    Between the micro-batches of a step gradients are unsharded, as weights are in the forward: then they are sent once a step.
    """

    def prepare(self, task: Task, make: MakeOptimizer) -> tuple[nn.Module, Any, LambdaLR]:
        self.copy = task.copy_of_module().to("cpu")
        if self.accelerator.num_processes == 1:  # what may be left of an elastic run: whole weights, the same checkpoints
            task.module.to(self.accelerator.device)
        else:
            mesh = init_device_mesh(self.accelerator.device.type, (self.accelerator.num_processes,))
            for unit in [*task.units(), task.module]:
                fully_shard(unit, mesh=mesh)
        self.module: nn.Module = task.module
        self.optimizer, scheduler = make(task.module)  # its parameters are others than before
        # accelerate would write the first process's share for all; hooks save these objects, which it has not prepared.
        self.accelerator.register_save_state_pre_hook(self._save)
        self.accelerator.register_load_state_pre_hook(self._load)
        return task.module, self.optimizer, scheduler

    def micro_batch(self, module: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
        return nullcontext()

    def clip(self, module: nn.Module, max_norm: float) -> Tensor | float | None:
        norm = super().clip(module, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def full_weights(self, module: nn.Module) -> AbstractContextManager[nn.Module]:
        weights = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
        self.copy.load_state_dict(cast(dict[str, Tensor], weights))
        return _moved(self.copy, self.accelerator.device)

    def _save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """Write weights and optimiser state unsharded, so that any number of processes can go on from them."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        tensors, state = get_state_dict(self.module, self.optimizer, options=options)
        if self.accelerator.is_main_process:
            # Clones: tied weights are one tensor, which the format does not have.
            weights_to_write = {name: each.clone() for name, each in cast(dict[str, Tensor], tensors).items()}
            save_file(weights_to_write, Path(folder) / WEIGHTS_FILE)
            torch.save(state, Path(folder) / OPTIMIZER_FILE)

    def _load(self, models: list[nn.Module], folder: str) -> None:
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=cast(dict[str, Any], load_file(Path(folder) / WEIGHTS_FILE)),
            optim_state_dict=torch.load(Path(folder) / OPTIMIZER_FILE, map_location="cpu", weights_only=True),
            options=StateDictOptions(full_state_dict=True),
        )


class DeepSpeedEngine(TrainingEngine):
    """ZeRO, by the engine that accelerate wraps; `clip` only reports the norm, DeepSpeed has clipped before its step."""

    def __init__(self, accelerator: Accelerator, schedule: ScheduleConfig, optimizer: OptimizerConfig) -> None:
        super().__init__(accelerator)
        self.plugin = accelerator.state.deepspeed_plugin
        self.shards_weights = self.plugin.zero_stage == 3
        config = self.plugin.deepspeed_config
        for name in ("optimizer", "scheduler"):
            if name in config:
                raise ConfigError(f"{name} of DeepSpeed's config file: the recipe's `optimizer` decides it; take it out")
        for name in {"fp16", "bf16"} - {schedule.mixed_precision}:
            if config.get(name, {}).get("enabled") is True:
                raise ConfigError(f"{name} of DeepSpeed's config file: schedule.mixed_precision decides it; take it out")
        accelerator.gradient_accumulation_steps = schedule.gradient_accumulation_steps
        config.pop("train_batch_size", None)  # follows from the others
        decided = {
            "train_micro_batch_size_per_gpu": schedule.batch_size,
            "gradient_accumulation_steps": schedule.gradient_accumulation_steps,
            "gradient_clipping": optimizer.max_grad_norm,
        }
        for name, own in decided.items():
            if (asked := config.get(name, "auto")) not in ("auto", 1, own):  # 1: accelerate's, where the file has none
                log.warning("%s %s of DeepSpeed's config file is overridden: the recipe says %s", name, asked, own)
        config |= decided | {
            # As the other engines add gradients up and send them; DeepSpeed takes the dtype that the products have.
            "data_types": {"grad_accum_dtype": "fp32"} | config.get("data_types", {}),
            "communication_data_type": config.get("communication_data_type", "fp32"),
            # Otherwise accelerate uses DeepSpeed's Adam where the state is on the CPU: with its own betas, and out of the
            # learning rate schedule's reach.
            "zero_force_ds_cpu_optimizer": False,
        }

    def prepare(self, task: Task, make: MakeOptimizer) -> tuple[nn.Module, Any, LambdaLR]:
        optimizer, scheduler = make(task.module)
        if self.shards_weights:  # while a module runs, ZeRO-3 gathers the weights that it owns
            from deepspeed.runtime.zero import register_external_parameter

            self.copy = task.copy_of_module().to("cpu")
            for parameter in task.read_from_outside():
                register_external_parameter(task.module, parameter)
        return *self.accelerator.prepare(task.module, optimizer), scheduler

    def micro_batch(self, module: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        self.accelerator.sync_gradients = last  # otherwise DeepSpeed takes a step with each
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss, scale_wrt_gas=False)  # divided by the labels of the whole step already

    @contextmanager
    def full_weights(self, module: nn.Module) -> Iterator[nn.Module]:
        unwrapped = self.accelerator.unwrap_model(module)
        if not self.shards_weights:
            yield unwrapped
            return
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(unwrapped.parameters()):
            self.copy.load_state_dict(unwrapped.state_dict())
        with _moved(self.copy, self.accelerator.device) as copy:
            yield copy


@contextmanager
def _moved(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Yield a module that is kept in the CPU's memory on `device`."""
    try:
        yield module.to(device)
    finally:
        module.to("cpu")

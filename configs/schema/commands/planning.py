"""The config of `draftsmith plan`: a training recipe, the machine it is to run on, and how much data there is.

A plan's config is a recipe of `configs/heads` or `configs/distill` with two more sections. Imports no torch.
"""

from __future__ import annotations

from typing import Literal

from configs.schema.base import PositiveFloat, PositiveInt, PositiveShare, Settings
from configs.schema.training import DistillConfig, HeadsConfig


class Machine(Settings):
    """A kind of machine, each number of one accelerator."""

    memory_gib: PositiveFloat
    host_memory_gib: PositiveFloat  # an accelerator's share of its node's memory


MACHINES = {
    "laptop_cpu": Machine(memory_gib=16.0, host_memory_gib=16.0),
    "h100_80gb": Machine(memory_gib=79.0, host_memory_gib=256.0),
    "h200_141gb": Machine(memory_gib=139.0, host_memory_gib=256.0),
}


class HardwareConfig(Settings):
    """The machines of a run. None takes the preset's number."""

    preset: Literal["laptop_cpu", "h100_80gb", "h200_141gb"] = "laptop_cpu"
    num_accelerators: PositiveInt = 1  # GPUs, or processes on CPUs, over all nodes
    accelerators_per_node: PositiveInt = 8
    memory_gib: PositiveFloat | None = None
    host_memory_gib: PositiveFloat | None = None

    @property
    def machine(self) -> Machine:
        """The preset, with what was given in place of its numbers."""
        given = {name: value for name in Machine.model_fields if (value := getattr(self, name)) is not None}
        return MACHINES[self.preset].model_copy(update=given)

    @property
    def on_cpu(self) -> bool:
        """Whether its processes have no accelerators."""
        return self.preset == "laptop_cpu"


class WorkloadConfig(Settings):
    """The training data, for a plan made before there are any. None is counted in `data.train`."""

    num_conversations: PositiveInt | None = None
    mean_tokens: PositiveFloat | None = None  # of a conversation, prompt and answer, cut at data.max_length
    label_share: PositiveShare | None = None  # of those tokens, the answer's


class PlanHeadsConfig(HeadsConfig):
    """`draftsmith plan`: the memory and disk that a recipe of `train/heads.py` takes."""

    hardware: HardwareConfig = HardwareConfig()
    workload: WorkloadConfig = WorkloadConfig()


class PlanDistillConfig(DistillConfig):
    """`draftsmith plan`: the memory and disk that a recipe of `train/distill.py` takes."""

    hardware: HardwareConfig = HardwareConfig()
    workload: WorkloadConfig = WorkloadConfig()


PlanConfig = PlanHeadsConfig | PlanDistillConfig

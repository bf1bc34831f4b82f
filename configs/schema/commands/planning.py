"""The config of `draftsmith plan`: a training recipe, the machine it is to run on, and how much data there is.

A plan's config is a recipe of `configs/heads` or `configs/distill` with two more sections. Imports no torch.
"""

from __future__ import annotations

from typing import Literal

from configs.schema.base import PositiveFloat, PositiveInt, PositiveShare, Settings
from configs.schema.training import DistillConfig, HeadsConfig

# Memory in GiB, by preset: an accelerator's, and its share of its node's.
MEMORY_GIB = {"laptop_cpu": (16.0, 16.0), "h100_80gb": (79.0, 256.0), "h200_141gb": (139.0, 256.0)}


class HardwareConfig(Settings):
    """The machines of a run. None takes the preset's number."""

    preset: Literal["laptop_cpu", "h100_80gb", "h200_141gb"] = "laptop_cpu"
    num_accelerators: PositiveInt = 1  # GPUs, or processes on CPUs, over all nodes
    accelerators_per_node: PositiveInt = 8
    memory_gib: PositiveFloat | None = None
    host_memory_gib: PositiveFloat | None = None

    @property
    def room_gib(self) -> tuple[float, float]:
        """Memory of an accelerator, and its share of its node's."""
        own, host = MEMORY_GIB[self.preset]
        return self.memory_gib or own, self.host_memory_gib or host

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

"""The config of `draftsmith plan`: a training recipe, the machine it is to run on, and how much data there is.

A plan's config is a recipe of `configs/heads` or `configs/distill` with two more sections. The named machines have their
makers' figures, except for `laptop_cpu`, which was measured. Imports no torch.
"""

from __future__ import annotations

from typing import Literal

from configs.schema.base import PositiveFloat, PositiveInt, PositiveShare, Settings
from configs.schema.training import DistillConfig, HeadsConfig

PresetName = Literal["laptop_cpu", "a100_80gb", "h100_80gb", "h200_141gb"]

# FLOPs (`train.plan`) over training seconds and the processor's 0.47 TFLOP/s, of a training by configs/heads/eagle3.yaml from a
# cache. No GPU was measured; docs/scaling.md says so.
MEASURED_UTILISATION = 0.64


class Preset(Settings):
    """A kind of machine, each number of one accelerator; rates are in powers of ten, memory in GiB."""

    memory_gib: PositiveFloat
    tflops: PositiveFloat  # dense bfloat16
    memory_gb_per_second: PositiveFloat
    disk_gb_per_second: PositiveFloat
    host_memory_gib: PositiveFloat  # an accelerator's share of its node's memory


PRESETS: dict[PresetName, Preset] = {
    # Measured on two cores of a shared machine: a product of 2048-wide bfloat16 matrices, memory as in large matrix-vector
    # products.
    "laptop_cpu": Preset(memory_gib=16.0, tflops=0.47, memory_gb_per_second=18.0, disk_gb_per_second=0.5, host_memory_gib=16.0),
    "a100_80gb": Preset(
        memory_gib=79.0, tflops=312.0, memory_gb_per_second=2039.0, disk_gb_per_second=2.0, host_memory_gib=128.0
    ),
    "h100_80gb": Preset(
        memory_gib=79.0, tflops=989.0, memory_gb_per_second=3350.0, disk_gb_per_second=2.0, host_memory_gib=256.0
    ),
}
PRESETS["h200_141gb"] = PRESETS["h100_80gb"].model_copy(update={"memory_gib": 139.0, "memory_gb_per_second": 4800.0})


class HardwareConfig(Settings):
    """The machines of a run. None takes the number that was measured, or the preset's."""

    preset: PresetName = "laptop_cpu"
    num_accelerators: PositiveInt = 1  # GPUs, or processes on CPUs, over all nodes
    accelerators_per_node: PositiveInt = 8
    measured: str | None = None  # gpu-check.json, which `make gpu-check` writes on such a machine
    memory_gib: PositiveFloat | None = None
    tflops: PositiveFloat | None = None
    memory_gb_per_second: PositiveFloat | None = None
    disk_gb_per_second: PositiveFloat | None = None
    host_memory_gib: PositiveFloat | None = None
    utilisation: PositiveShare = MEASURED_UTILISATION  # FLOP/s reached in a step's matrix products over `tflops`

    @property
    def machine(self) -> Preset:
        """The preset, with what was given in place of its numbers."""
        given = {name: value for name in Preset.model_fields if (value := getattr(self, name)) is not None}
        return PRESETS[self.preset].model_copy(update=given)


class WorkloadConfig(Settings):
    """The training data, for a plan made before there are any. None is counted in `data.train`."""

    num_conversations: PositiveInt | None = None
    mean_tokens: PositiveFloat | None = None  # of a conversation, prompt and answer, cut at data.max_length
    label_share: PositiveShare | None = None  # of those tokens, the answer's


class PlanHeadsConfig(HeadsConfig):
    """`draftsmith plan`: the memory and time that a recipe of `train/heads.py` takes."""

    hardware: HardwareConfig = HardwareConfig()
    workload: WorkloadConfig = WorkloadConfig()


class PlanDistillConfig(DistillConfig):
    """`draftsmith plan`: the memory and time that a recipe of `train/distill.py` takes."""

    hardware: HardwareConfig = HardwareConfig()
    workload: WorkloadConfig = WorkloadConfig()


PlanConfig = PlanHeadsConfig | PlanDistillConfig

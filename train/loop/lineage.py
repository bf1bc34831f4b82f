"""The run that a checkpoint belongs to, and whether another run may resume from it.

The number of processes may change where checkpoints are unsharded (replicated weights, and FSDP2) and a step has as many
micro-batches in all as before: `gradient_accumulation_steps` makes up for missing processes. Micro-batches are then dealt out
in the same order, so the run takes the same steps up to rounding, except for the last step of an epoch, which accelerate fills
up so that all processes have equally many. Random streams of new processes begin at the seed. DeepSpeed's checkpoints are not
resharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from accelerate import Accelerator
from accelerate.utils import DistributedType, parse_flag_from_env
from pydantic import Field

from configs.runtime.run_record import training_fingerprint
from configs.schema.base import PositiveInt, Settings
from configs.schema.training import ScheduleConfig

REPLICATED, FSDP2 = "whole", "FSDP2"  # names of engines in checkpoints; DeepSpeed's are ZeRO-1 to ZeRO-3


class Lineage(Settings):
    """The run that a checkpoint belongs to."""

    config_sha256: str = Field(pattern="^[0-9a-f]{64}$")  # of the config and of what its paths hold
    engine: str  # see `engine_name`
    num_processes: PositiveInt
    micro_batches_per_step: PositiveInt  # over all processes

    @classmethod
    def of(
        cls, accelerator: Accelerator, schedule: ScheduleConfig, config: Mapping[str, Any], contents: Mapping[str, str]
    ) -> Self:
        """Return the lineage of a run.

        Args:
            accelerator: the run's.
            schedule: the run's.
            config: the run's config as JSON values.
            contents: hashes of what the config's paths hold, by key: a file may change under its name.
        """
        return cls(
            config_sha256=training_fingerprint(config, contents),
            engine=engine_name(accelerator),
            num_processes=accelerator.num_processes,
            micro_batches_per_step=accelerator.num_processes * schedule.gradient_accumulation_steps,
        )

    def objection(self, then: Lineage) -> str | None:
        """Return why this run cannot resume a checkpoint of `then`, as a phrase that follows "checkpoint X"; None if it can."""
        if then.config_sha256 != self.config_sha256:
            return "belongs to a run with another config or other data"
        if then.engine != self.engine:
            return f"was written with weights held {_held(then)}, and this run holds them {_held(self)}"
        if then.num_processes != self.num_processes and self.engine not in (REPLICATED, FSDP2):
            return f"was sharded over {then.num_processes} processes by {self.engine}, and this run has {self.num_processes}"
        if then.micro_batches_per_step != self.micro_batches_per_step:
            return (
                f"had steps of {then.micro_batches_per_step} micro-batches over {then.num_processes} processes, this run has "
                f"steps of {self.micro_batches_per_step} over {self.num_processes}: choose "
                "schedule.gradient_accumulation_steps so that its product with the processes is the same"
            )
        return None


def engine_name(accelerator: Accelerator) -> str:
    """Return the name by which checkpoints know how this run's processes hold weights and the optimiser's state."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    return FSDP2 if fsdp_is_requested() and accelerator.num_processes > 1 else REPLICATED


def fsdp_is_requested() -> bool:
    """Return whether accelerate's config or environment requests FSDP."""
    return bool(parse_flag_from_env("ACCELERATE_USE_FSDP"))


def _held(lineage: Lineage) -> str:
    return "replicated in every process" if lineage.engine == REPLICATED else f"sharded by {lineage.engine}"

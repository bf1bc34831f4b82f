"""What a run must have in common with a checkpoint to go on from it, and the sentence where it has not.

Another number of processes is taken where every process holds all weights and a step has as many micro-batches in all as
before: `gradient_accumulation_steps` makes up for processes that are missing. Micro-batches are dealt out in the same order
then, so the run goes on with the same steps up to the rounding of sums, but for the last step of an epoch, which accelerate
fills up so that all processes have equally many. Random streams of processes that are new begin at the seed. So it is with
FSDP2, whose checkpoints are written whole. Left out: resharding what DeepSpeed's checkpoints hold in parts.
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

WHOLE, FSDP2 = "whole", "FSDP2"  # of the names of engines (`train.loop.engines`); DeepSpeed's are ZeRO-1 to ZeRO-3


class Lineage(Settings):
    """The run that a checkpoint belongs to."""

    config_sha256: str = Field(pattern="^[0-9a-f]{64}$")  # of the config and of what its paths hold
    engine: str  # "whole": every process holds all weights; or what splits them or the optimiser's state
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
            config: the whole config as JSON values.
            contents: hashes of what the config's paths hold, by key: a file may change under its name.
        """
        return cls(
            config_sha256=training_fingerprint(config, contents),
            engine=engine_name(accelerator),
            num_processes=accelerator.num_processes,
            micro_batches_per_step=accelerator.num_processes * schedule.gradient_accumulation_steps,
        )

    def objection(self, then: Lineage) -> str | None:
        """Return why this run cannot go on from a checkpoint of `then`, in words that follow "checkpoint X"; None if it can."""
        if then.config_sha256 != self.config_sha256:
            return "belongs to a run with another config or other data"
        if then.engine != self.engine:
            return f"was written with weights held {_held(then)}, and this run holds them {_held(self)}"
        if then.num_processes != self.num_processes and self.engine not in (WHOLE, FSDP2):
            return f"was split over {then.num_processes} processes by {self.engine}, and this run has {self.num_processes}"
        if then.micro_batches_per_step != self.micro_batches_per_step:
            return (
                f"had steps of {then.micro_batches_per_step} micro-batches over {then.num_processes} processes, this run has "
                f"steps of {self.micro_batches_per_step} over {self.num_processes}: choose "
                "schedule.gradient_accumulation_steps so that its product with the processes is the same"
            )
        return None


def engine_name(accelerator: Accelerator) -> str:
    """Return what checkpoints call the way in which this run's processes hold weights and the optimiser's state."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    return FSDP2 if fsdp_is_asked_for() and accelerator.num_processes > 1 else WHOLE


def fsdp_is_asked_for() -> bool:
    """Return whether accelerate's config or environment asks for FSDP."""
    return bool(parse_flag_from_env("ACCELERATE_USE_FSDP"))


def _held(lineage: Lineage) -> str:
    return "whole in every process" if lineage.engine == WHOLE else f"in parts by {lineage.engine}"

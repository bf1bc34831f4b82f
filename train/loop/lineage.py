"""The run that a checkpoint belongs to, and whether another run may resume from it.

The number of processes may change where checkpoints are unsharded (replicated weights, and FSDP2) and a step has as many
micro-batches in all as before. These are then shared out in the same order, so the run takes the same steps up to rounding,
except where accelerate has to fill up an epoch's last step. Random streams of new processes begin at the seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Self

from accelerate import Accelerator
from accelerate.utils import DistributedType, parse_flag_from_env
from pydantic import Field

from configs.runtime.redaction import mask_secrets
from configs.schema.base import PositiveInt, Settings, dotted
from configs.schema.training import ScheduleConfig

# Keys of a training's config that change none of its weights but by the order of sums, sections with all that is in them. A run
# may be resumed with others. Whatever is not here decides.
CHANGES_NO_WEIGHT = {
    "output",
    # where and how often things are written, how long is waited, and whether a run is resumed
    *(f"schedule.{name}" for name in ("log_every_steps", "eval_every_steps", "checkpoint_every_steps", "keep_checkpoints")),
    *("schedule.trackers", "schedule.process_timeout_seconds", "schedule.resume"),
    # their content is compared by its hash
    *("data.train", "data.held_out", "data.cache", "init", "target.name", "target.revision"),
    # memory and speed, and which machines and devices compute; micro-batches a step are compared over all processes
    *("loss.chunk_size", "schedule.activation_checkpointing", "schedule.gradient_accumulation_steps"),
    *(f"target.{name}" for name in ("states", "shards", "device", "device_map", "max_memory", "offload_folder")),
    "target.forward",  # decoding alone runs another than transformers'
    "sanity",  # leaves the head as it was
    # what is refused
    *("target.images.max_bytes", "target.images.max_pixels", "target.audio.max_bytes", "target.audio.max_seconds"),
}
REPLICATED, FSDP2 = "whole", "FSDP2"  # names of engines in checkpoints; DeepSpeed's are ZeRO-1 to ZeRO-3
OTHER_RUN = "belongs to a run with another config or other data"


class Lineage(Settings):
    """The run that a checkpoint belongs to."""

    config_sha256: str = Field(pattern="^[0-9a-f]{64}$")  # of `deciding_settings`
    engine: str  # see `engine_name`
    num_processes: PositiveInt
    micro_batches_per_step: PositiveInt  # over all processes
    settings: dict[str, Any]  # what was hashed, secrets masked

    @classmethod
    def of(
        cls, accelerator: Accelerator, schedule: ScheduleConfig, config: Mapping[str, Any], contents: Mapping[str, str]
    ) -> Self:
        """Return the lineage of a run, by its config as JSON values and the hashes of what the config's paths hold."""
        settings = deciding_settings(config, contents)
        return cls(
            config_sha256=hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
            engine=engine_name(accelerator),
            num_processes=accelerator.num_processes,
            micro_batches_per_step=accelerator.num_processes * schedule.gradient_accumulation_steps,
            settings=mask_secrets(settings),
        )

    def objection(self, then: Lineage) -> str | None:
        """Return why this run cannot resume a checkpoint of `then`, as a phrase that follows "checkpoint X"; None if it can."""
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
        if then.config_sha256 == self.config_sha256:
            return None
        new, old = self.settings, then.settings  # alike where secrets alone differ, which are masked
        changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
        spelled = ", ".join(f"{key} {old.get(key)} -> {new.get(key)}" for key in changed)
        return f"{OTHER_RUN}{f' ({spelled})' if spelled else ''}, which would give other weights"


def deciding_settings(config: Mapping[str, Any], contents: Mapping[str, str]) -> dict[str, Any]:
    """Return by dotted key what decides a training's weights and which are kept: `contents`, and all but `CHANGES_NO_WEIGHT`.

    The decoding of held-out prompts belongs to it: scores got in another way cannot be compared with the best so far. Options
    that are off (None) do not.
    """
    flat = dotted(config)
    kept = {key: value for key, value in flat if value is not None and not changes_no_weight(key)}
    return kept | {f"contents.{name}": sha256 for name, sha256 in contents.items()}


def changes_no_weight(key: str) -> bool:
    """Return whether a dotted key of a training's config is one of `CHANGES_NO_WEIGHT`, or in a section of them."""
    steps = key.split(".")
    return any(".".join(steps[: end + 1]) in CHANGES_NO_WEIGHT for end in range(len(steps)))


def engine_name(accelerator: Accelerator) -> str:
    """Return the name by which checkpoints know how this run's processes hold weights and the optimiser's state."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    return FSDP2 if fsdp_is_requested() else REPLICATED


def fsdp_is_requested() -> bool:
    """Return whether accelerate's config or environment requests FSDP."""
    return bool(parse_flag_from_env("ACCELERATE_USE_FSDP"))


def _held(lineage: Lineage) -> str:
    return "replicated in every process" if lineage.engine == REPLICATED else f"sharded by {lineage.engine}"

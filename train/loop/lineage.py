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

from configs.runtime.errors import ConfigError
from configs.runtime.redaction import mask_secrets
from configs.schema.base import PositiveInt, Settings
from configs.schema.training import ScheduleConfig
from train.loop.telemetry import flatten

LENGTH = ("schedule.max_steps", "schedule.epochs")  # a run may be resumed with more of them
# Keys of a training's config that change none of its weights but by the order of sums, sections with all that is in them. A run
# may be resumed with others. Whatever is not here decides.
CHANGES_NO_WEIGHT = {
    "output",
    # where and how often things are written, how long is waited, and how a resume is asked for
    *(f"schedule.{name}" for name in ("log_every_steps", "eval_every_steps", "checkpoint_every_steps", "keep_checkpoints")),
    *(f"schedule.{name}" for name in ("trackers", "peak_tflops", "process_timeout_seconds", "evaluation_timeout_seconds")),
    *("schedule.resume", "schedule.resume_anyway"),
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


class Lineage(Settings):
    """The run that a checkpoint belongs to."""

    config_sha256: str = Field(pattern="^[0-9a-f]{64}$")  # of the config and of what its paths hold
    engine: str  # see `engine_name`
    num_processes: PositiveInt
    micro_batches_per_step: PositiveInt  # over all processes
    settings: dict[str, Any] | None = None  # what was hashed, secrets masked

    @classmethod
    def of(
        cls, accelerator: Accelerator, schedule: ScheduleConfig, config: Mapping[str, Any], contents: Mapping[str, str]
    ) -> Self:
        """Return the lineage of a run, by its config as JSON values and the hashes of what the config's paths hold."""
        return cls(
            config_sha256=training_fingerprint(config, contents),
            engine=engine_name(accelerator),
            num_processes=accelerator.num_processes,
            micro_batches_per_step=accelerator.num_processes * schedule.gradient_accumulation_steps,
            settings=mask_secrets(deciding_settings(config, contents)),
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
                "schedule.gradient_accumulation_steps so that its product with the processes is the same, or give that product "
                "as schedule.micro_batches_per_step"
            )
        return None

    def changes(self, then: Lineage) -> dict[str, tuple[Any, Any]]:
        """Return the settings that differ, as dotted key -> (value then, value now); None where a key is not set."""
        new, old = flatten(self.settings or {}), flatten(then.settings or {})
        return {key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)}

    def objection_to_settings(self, then: Lineage) -> str | None:
        """Return why this run's settings or data should not go on from those of `then`; a person may insist."""
        if then.config_sha256 == self.config_sha256:
            return None
        if then.settings in (None, self.settings):  # the same but for secrets, which are masked
            return "belongs to a run with another config or other data"
        changed = {key: values for key, values in self.changes(then).items() if not changes_no_weight(key)}
        lengths = {key: changed.pop(key) for key in LENGTH if key in changed}
        shorter = {key: values for key, values in lengths.items() if None not in values and values[0] > values[1]}
        found = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in (changed or shorter).items())
        if changed:
            return f"belongs to a run with another config or other data ({found}), which would give other weights"
        return f"belongs to a longer run ({found}), whose learning rate fell over more steps" if shorter else None


def deciding_settings(config: Mapping[str, Any], contents: Mapping[str, str]) -> dict[str, Any]:
    """Return what decides a training's weights and which are kept: all of its config but `CHANGES_NO_WEIGHT`, and `contents`.

    The decoding of held-out prompts belongs to it: scores got in another way cannot be compared with the best so far. Options
    that are off (None) do not.
    """
    relevant: dict[str, Any] = _deciding(config)
    if relevant.get("target", {}).get("tokens") == "text":  # the default
        del relevant["target"]["tokens"]
    return relevant | {"contents": dict(contents)}


def changes_no_weight(key: str) -> bool:
    """Return whether a dotted key of a training's config is one of `CHANGES_NO_WEIGHT`, or in a section of them."""
    steps = key.split(".")
    return any(".".join(steps[: end + 1]) in CHANGES_NO_WEIGHT for end in range(len(steps)))


def _deciding(value: Any, above: str = "") -> Any:
    if isinstance(value, list):
        return [_deciding(each, f"{above}*.") for each in value]
    if not isinstance(value, dict):
        return value
    kept = {name: each for name, each in value.items() if each is not None and above + name not in CHANGES_NO_WEIGHT}
    return {name: _deciding(each, f"{above}{name}.") for name, each in kept.items()}


def training_fingerprint(config: Mapping[str, Any], contents: Mapping[str, str]) -> str:
    """Return a hash of `deciding_settings`."""
    return hashlib.sha256(json.dumps(deciding_settings(config, contents), sort_keys=True).encode()).hexdigest()


def accumulating(schedule: ScheduleConfig, num_processes: int) -> ScheduleConfig:
    """Return the schedule of a run of so many processes, with the micro-batches of a step that each of them has."""
    in_all = schedule.micro_batches_per_step
    if in_all is None:
        return schedule
    if in_all % num_processes:
        raise ConfigError(
            f"schedule.micro_batches_per_step: {in_all} cannot be shared evenly by {num_processes} processes; give a "
            "multiple of each number of processes that the run may have"
        )
    own = {"gradient_accumulation_steps": in_all // num_processes, "micro_batches_per_step": None}
    return schedule.model_copy(update=own)


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

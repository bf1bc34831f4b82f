"""Experiment trackers, run by accelerate: tensorboard, wandb, trackio, mlflow.

The config is passed one setting a key, `optimizer.learning_rate`, because mlflow drops values of more than 500 characters, and
without secrets. Trackers find their server and key in the environment (`WANDB_API_KEY`, `MLFLOW_TRACKING_URI`, `HF_TOKEN`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from configs.runtime.errors import ConfigError
from configs.runtime.redaction import mask_secrets
from configs.schema.training import ScheduleConfig

PROJECT = "draftsmith"
FOLDER = "trackers"  # below the run's folder


def check_installed(schedule: ScheduleConfig) -> None:
    """Refuse a tracker whose library is missing, which accelerate would ignore.

    Raises:
        ConfigError: one is.
    """
    available = {tracker.value for tracker in get_available_trackers()}
    for tracker in schedule.trackers:
        if tracker not in available:
            raise ConfigError(f"schedule.trackers: {tracker} is not installed; install it, or take it out of the list")


def start_trackers(accelerator: Accelerator, output: Path, config: Mapping[str, Any]) -> None:
    """Begin a run with every tracker that the accelerator has, named after the output folder.

    Args:
        output: the run's folder; wandb's files go below it as tensorboard's do.
        config: as JSON values.
    """
    name = output.resolve().name
    if accelerator.is_main_process and accelerator.log_with:
        (output / FOLDER).mkdir(parents=True, exist_ok=True)  # wandb would go elsewhere without it
    accelerator.init_trackers(
        PROJECT,
        config=flat_config(config),
        init_kwargs={
            "wandb": {"name": name, "dir": str(output / FOLDER)},
            "trackio": {"name": name},
            "mlflow": {"run_name": name},
        },
    )


def flat_config(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the settings of a config by dotted key, lists and nulls as JSON, secrets masked."""
    return dict(_flat(mask_secrets(dict(config)), ""))


def _flat(section: Mapping[str, Any], above: str) -> Iterator[tuple[str, bool | int | float | str]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value if isinstance(value, bool | int | float | str) else json.dumps(value)

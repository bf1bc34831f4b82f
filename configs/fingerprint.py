"""What decides a training run's weights, as one hash: checkpoints and kept runs are found again by it. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Of the schedule: where and how often things are written, and what is counted as micro-batches a step instead.
QUIET = {
    "log_every_steps",
    "eval_every_steps",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "resume",
    "trackers",
    "profile",
    "peak_tflops",
    "gradient_accumulation_steps",
    "process_timeout_seconds",
    "loader_workers",
}


def training_fingerprint(config: Mapping[str, Any], contents: Mapping[str, str]) -> str:
    """Return a hash of what decides the weights and which are kept: not where and how often things are written, nor the gates.

    The decoding of held-out prompts belongs to it: scores got in another way cannot be compared with the best so far. Options
    that are off (None) do not: one that the schema gains later leaves the hashes of today's runs as they are.

    Args:
        config: a training's, as JSON values.
        contents: hashes of what the config's paths hold, and whatever else decides the weights, by key.
    """
    relevant = {name: value for name, value in config.items() if name not in ("output", "sanity", "schedule")}
    relevant["schedule"] = {name: value for name, value in config["schedule"].items() if name not in QUIET}
    relevant["contents"] = dict(contents)
    return hashlib.sha256(json.dumps(_without_none(relevant), sort_keys=True).encode()).hexdigest()


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value

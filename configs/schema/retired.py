"""Keys that earlier releases had: what they wrote (configs, artifacts, checkpoints) is still read, with one log line a key."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("draftsmith")


@dataclass(frozen=True)
class Retired:
    """A key that is no longer a setting.

    Args:
        sentence: ends the log line, and the error where the key asks for what is gone: why, or what to use instead.
        off: values that asked for nothing, which are ignored. A section counts as off where all it gives is in one of them.
            None: every value is ignored.
        resumes: whether a run resumes without the key, whatever value it had where every value is ignored.
    """

    sentence: str
    off: tuple[Any, ...] | None = (None,)
    resumes: bool = True


@dataclass(frozen=True)
class Renamed:
    """A key of another name; its value counts for that one."""

    name: str


NO_COMMUNICATION = Retired("a plan counts no communication", off=None)
# By the config class, or a class that it inherits from, and the key in it.
RETIRED: dict[str, Retired | Renamed] = {
    "AnswersConfig.draft": Retired("the target writes the answers by plain decoding, or a server does (answers.written_by)"),
    "AnswersConfig.num_speculative_tokens": Retired("it was for answers.draft", off=None),
    "AnswerServerConfig.answers_as": Retired(
        "servers answer with token ids (return_token_ids), as vLLM does", off=("token_ids",)
    ),
    "AnswerServerConfig.more_urls": Retired(
        "give one address in front of several servers, by vLLM's --data-parallel-size or a router", off=([],)
    ),
    "AnswerServerConfig.on_other_tokens": Retired("it was for answers as text", off=None),
    "EvalConfig.previous_report": Retired("eval/compare.py shows two reports side by side, and the gate takes --baseline"),
    "EvalConfig.simulate_acceptance": Retired("acceptance is measured, and no longer simulated"),
    "HeadsConfig.policy": Retired(
        "a head trained on its own drafts was no better", off=(None, {"on_policy": 0.0, "from_share": 0.0, "temperature": 0.0})
    ),
    "LossConfig.sampled_tokens": Retired("the loss is over the whole draft vocabulary; give a smaller head.draft_vocab_size"),
    "PolicyConfig.phases": Retired(
        "name one share of each batch by policy.on_policy",
        off=([{}], [{"from_share": 0.0, "on_policy": 0.0, "draft_states": 0.0}]),
    ),
    "PolicyConfig.top_p": Retired("answers are drawn from the draft's whole distribution"),
    "PolicyConfig.num_draft_tokens": Retired("the draft writes whole answers", off=None),
    "PushConfig.attempts": Retired("rerun a push that broke off: it resumes", off=None),
    "StudentConfig.layer_choice": Retired("name the kept blocks by student.layers"),
    "StudentConfig.num_layers": Retired("name the kept blocks by student.layers"),
    "StudentConfig.search_trials": Retired("it was for a search of blocks", off=None),
    "StudentConfig.search_conversations": Retired("it was for a search of blocks", off=None),
    "NeighbourhoodAcceptance.bound": Retired(
        "delta bounds the distance of a token's distribution from the target's", off=("step",)
    ),
    "TappedSettings.tap_noise": Retired(
        "noise on the taps lowered the acceptance length, and heads train without it", off=None, resumes=False
    ),
    "ScheduleConfig.loader_workers": Retired("the training process makes its batches, which takes 0.1 ms a row", off=None),
    "HardwareConfig.interconnect_gb_per_second": NO_COMMUNICATION,
    "HardwareConfig.network_gb_per_second": NO_COMMUNICATION,
    "HardwareConfig.latency_microseconds": NO_COMMUNICATION,
    "LosslessConfig.check_float32_prompts": Retired("every answer is checked, by a wider copy of the target", off=None),
}


def read_retired(classes: Iterable[str], values: Any) -> Any:
    """Return a section's values without retired keys, and with renamed ones under their name of today.

    Args:
        classes: names of the section's config class and of those that it inherits from.
        values: as a file has them; what is no mapping is returned as it is.

    Raises:
        ValueError: a retired key asks for what is gone, or a renamed one is given by both names.
    """
    if not isinstance(values, dict):
        return values
    names = list(classes)
    found = {key: entry for key in values for name in names if (entry := RETIRED.get(f"{name}.{key}")) is not None}
    kept = {key: value for key, value in values.items() if key not in found}
    for key, entry in found.items():
        if isinstance(entry, Renamed):
            if entry.name in values:
                raise ValueError(f"{key} is now called {entry.name}, and both are given: leave out {key}")
            logger.warning("%s is now called %s", key, entry.name)
            kept[entry.name] = values[key]
        elif entry.off is None or any(_is_within(values[key], off) for off in entry.off):
            logger.warning("%s is ignored: %s", key, entry.sentence)
        else:
            raise ValueError(f"{key} is no longer a setting: {entry.sentence}")
    return kept


def was_off(key: str, value: Any) -> bool:
    """Return whether a dotted key of a config of before is retired, or in a retired section, and had a value that meant off."""
    for retired, entry in RETIRED.items():
        if isinstance(entry, Retired):
            name = retired.partition(".")[2]
            _, found, below = f".{key}".rpartition(f".{name}")
            if found and (below == "" or below.startswith(".")):
                section = _nested(below[1:], value)
                if entry.off is None:
                    return entry.resumes or not section
                if any(_is_within(section, off) for off in entry.off):
                    return True
    return False


def _is_within(value: Any, off: Any) -> bool:
    """Say whether a value is `off`, or a section whose every key is as there."""
    if isinstance(value, Mapping) and isinstance(off, Mapping):
        return all(key in off and _is_within(each, off[key]) for key, each in value.items())
    return bool(value == off)


def _nested(key: str, value: Any) -> Any:
    for part in reversed(key.split(".") if key else []):
        value = {part: value}
    return value

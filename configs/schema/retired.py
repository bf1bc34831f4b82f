"""Keys that earlier releases had: what they wrote (configs, artifacts, checkpoints) is still read, with one log line a key."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

logger = logging.getLogger("draftsmith")


class Retired(NamedTuple):
    """A key that is no longer a setting."""

    sentence: str  # why, or what to use instead: ends the log line, and the error where the key asks for what is gone
    # Values that asked for nothing, which are ignored; a section does where each key that it gives is as in one of them.
    # None: every value is ignored
    off: tuple[Any, ...] | None = (None,)
    resumes: bool = True  # whether a run resumes without the key, where every value is ignored


NO_COMMUNICATION = Retired("a plan counts no communication", off=None)
# By the config class, or a class that it inherits from, and the key in it.
RETIRED = {
    "AdviceConfig.comparison_share": Retired("eval/run.py compares ways of decoding with the trained draft", off=None),
    "AnswersConfig.draft": Retired("the target writes the answers by plain decoding, or a server does (answers.written_by)"),
    "AnswersConfig.num_speculative_tokens": Retired("it was for answers.draft", off=None),
    "ServerConfig.answers_as": Retired("servers answer with token ids (return_token_ids), as vLLM does", off=("token_ids",)),
    "ServerConfig.more_urls": Retired(
        "give one address in front of several servers, by vLLM's --data-parallel-size or a router", off=([],)
    ),
    "ServerConfig.on_other_tokens": Retired("it was for answers as text", off=None),
    "ServerConfig.failures_in_a_row": Retired(
        "five prompts in a row without an answer after all retries end the run, and the same command resumes it", off=None
    ),
    "CacheConfig.server": Retired("servers of the target's hidden states make caches of either kind: target.states"),
    "EvalConfig.previous_report": Retired("eval/compare.py shows two reports side by side, and the gate takes --baseline"),
    "EvalConfig.simulate_acceptance": Retired("acceptance is measured, and no longer simulated"),
    "ExportConfig.report": Retired("it was for TensorRT-LLM, the one engine that drafted a given tree"),
    "HeadsConfig.policy": Retired(
        "a head trained on its own drafts was no better", off=(None, {"on_policy": 0.0, "from_share": 0.0, "temperature": 0.0})
    ),
    "HydraSettings.own_output_heads": Retired("one output head serves all depths", off=(None, False)),
    "HydraSettings.prefix_norm": Retired("the target's own head reads what the prefix layer puts out", off=(None, False)),
    "LoraSettings.target_modules": Retired("adapters are on every linear layer but the head"),
    "LossConfig.sampled_tokens": Retired("the loss is over the whole draft vocabulary; give a smaller head.draft_vocab_size"),
    "PolicyConfig.phases": Retired(
        "name one share of each batch by policy.on_policy",
        off=([{}], [{"from_share": 0.0, "on_policy": 0.0, "draft_states": 0.0}]),
    ),
    "PolicyConfig.top_p": Retired("answers are drawn from the draft's whole distribution"),
    "PolicyConfig.num_draft_tokens": Retired("the draft writes whole answers", off=None),
    "PushConfig.allow_target_files": Retired(
        "an export that holds the whole target is written by scripts/export.py and not published", off=(False,)
    ),
    "PushConfig.attempts": Retired("rerun a push that broke off: it resumes", off=None),
    "ParallelConfig.pipeline": Retired("give target.parallel.shard, which any family takes", off=(1,)),
    "StudentConfig.layer_choice": Retired("name the kept blocks by student.layers"),
    "StudentConfig.num_layers": Retired("name the kept blocks by student.layers"),
    "StudentConfig.search_trials": Retired("it was for a search of blocks", off=None),
    "StudentConfig.search_conversations": Retired("it was for a search of blocks", off=None),
    "MediaConfig.allow_urls": Retired("nothing is fetched: give files, or data URLs", off=(False,)),
    "MediaConfig.timeout_seconds": Retired("it was for images and sounds from URLs", off=None),
    "NeighbourhoodAcceptance.bound": Retired(
        "delta bounds the distance of a token's distribution from the target's", off=("step",)
    ),
    "TappedSettings.tap_noise": Retired(
        "noise on the taps lowered the acceptance length, and heads train without it", off=None, resumes=False
    ),
    "ScheduleConfig.profile": Retired("the shares of a step's time are in metrics.jsonl"),
    "ScheduleConfig.loader_workers": Retired("the training process makes its batches, which takes 0.1 ms a row", off=None),
    "HardwareConfig.interconnect_gb_per_second": NO_COMMUNICATION,
    "HardwareConfig.network_gb_per_second": NO_COMMUNICATION,
    "HardwareConfig.latency_microseconds": NO_COMMUNICATION,
    "LosslessConfig.check_float32_prompts": Retired("every answer is checked, by a wider copy of the target", off=None),
}


def read_retired(classes: Iterable[str], values: Any) -> Any:
    """Return a section's values without retired keys, one of which, where it asks for what is gone, is a ValueError.

    `classes` are the names of the section's config class and of those that it inherits from.
    """
    if not isinstance(values, dict):
        return values
    names = list(classes)
    found = {key: entry for key in values for name in names if (entry := RETIRED.get(f"{name}.{key}")) is not None}
    for key, entry in found.items():
        if entry.off is not None and not _is_one_of(values[key], entry.off):
            raise ValueError(f"{key} is no longer a setting: {entry.sentence}")
        logger.warning("%s is ignored: %s", key, entry.sentence)
    return {key: value for key, value in values.items() if key not in found}


def was_off(key: str, value: Any) -> bool:
    """Return whether a dotted key of a config of before is retired, or in a retired section, and had a value that meant off."""
    for retired, entry in RETIRED.items():
        _, found, below = f".{key}".rpartition(f".{retired.partition('.')[2]}")
        if not found or not (below == "" or below.startswith(".")):
            continue
        section = value
        for part in reversed(below.split(".")[1:]):
            section = {part: section}
        if entry.off is None:
            return entry.resumes or not section
        if _is_one_of(section, entry.off):
            return True
    return False


def _is_one_of(value: Any, off: Iterable[Any]) -> bool:
    return any(_is_within(value, each) for each in off)


def _is_within(value: Any, off: Any) -> bool:
    """Say whether a value is `off`, or a section whose every key is as there."""
    if isinstance(value, Mapping) and isinstance(off, Mapping):
        return all(key in off and _is_within(each, off[key]) for key, each in value.items())
    return bool(value == off)

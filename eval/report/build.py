"""From a run's records to its report: every number is computed here, by one pure function.

Numbers only, never formatted strings; units in names; `None` where a number is not available. `eval.report.schema` fixes the
form, `eval.report.tables` and `eval.report.page` render it, `eval.release` judges it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, WITH_LOOKUP
from eval.measure.suite import Suite
from eval.metrics.acceptance import SAMPLES_A_SIDE, Tally
from eval.metrics.speed import compare_speed, summarise_advantage, summarise_speed, timings_within
from eval.report.samples import Decode, pick_samples
from eval.report.schema import SCHEMA_VERSION, Report, parse_report
from eval.stats import LEVEL, detectable_percent

# Of acceptance, what is kept of other ways than the draft's.
KEPT = ("tokens_per_target_step", "tokens_per_target_step_ci", "accepted_per_round", "draft_token_yield")


class Bootstrap(TypedDict):
    """The resampling behind every interval of a report."""

    samples: int
    seed: int


def build_report(
    *,
    suites: Sequence[tuple[Suite, Tally]],
    decode_tokens: Decode,
    bootstrap_samples: int,
    seed: int,
    **sections: Any,
) -> Report:
    """Compute the report of one or several suites and what was decoded of each, the first being the one that it leads with.

    Answers may be missing, and the report says so. The other sections (target, draft, decode, losslessness, hardware, versions,
    git, command, warnings; quality, energy) are kept as they are given.
    """
    bootstrap: Bootstrap = {"samples": bootstrap_samples, "seed": seed}
    (first, records), *others = suites
    texts = {(prompt.prompt_id, turn): text for prompt in first.prompts for turn, text in enumerate(prompt.turns)}
    values = {
        "schema_version": SCHEMA_VERSION,
        "statistics": {"bootstrap_samples": bootstrap_samples, "seed": seed, "level": LEVEL},
        **_suite(first, records, bootstrap),
        "suites": {suite.name: _suite(suite, own, bootstrap) for suite, own in others},
        "samples": pick_samples(records.samples, texts, decode_tokens, SAMPLES_A_SIDE),
    }
    return parse_report({"git": None, "command": None, "warnings": []} | sections | values, "the report just built")


def _suite(suite: Suite, records: Tally, bootstrap: Bootstrap) -> dict[str, Any]:
    if unknown := records.turns - set(suite.asked):
        raise ValueError("prompt {}, turn {} was decoded but is not among the prompts asked for".format(*min(unknown)))
    speculative = records.acceptance(SPECULATIVE)
    per_prompt = speculative.per_prompt
    committed, rounds = ([counts[column] for counts in per_prompt.values()] for column in (0, 1))
    ways = {mode: _other_way(records, mode, bootstrap) for mode in records.modes if mode != SPECULATIVE}
    both = ways.pop(WITH_LOOKUP, None)
    return {
        "prompts": {
            "suite": suite.name,
            "source": suite.source,
            "format": suite.format,
            "sha256": suite.sha256,
            "ids": suite.ids,
            "num_asked": len(suite.prompts),
            "num_turns": len(suite.asked),
            "num_prompts": len(records.answered(suite.asked)),  # all their turns, in every mode
            "num_trained_on": None if suite.trained_on is None else len(suite.trained_on),
            "categories": records.categories,
            "failed": [
                {name: getattr(each, name) for name in ("prompt_id", "turn", "mode", "stop_reason")} for each in records.failed
            ],
        },
        "acceptance": {
            **speculative.summarise(**bootstrap),
            "by_context_tokens": speculative.by_context(**bootstrap),
            "detectable_change_percent": detectable_percent([committed], [rounds]),
            "per_prompt": per_prompt,
        },
        "speed": summarise_speed(records.timings, **bootstrap),
        "by_category": {category: _category(records, category, bootstrap) for category in records.categories},
        "baselines": {mode: way | _against_draft(records, mode, per_prompt, bootstrap) for mode, way in ways.items()},
        "with_lookup": None if both is None else both | _against_draft_alone(records, per_prompt, bootstrap),
    }


def _category(records: Tally, category: str, bootstrap: Bootstrap) -> dict[str, Any]:
    share = records.acceptance(SPECULATIVE, category)
    timings = timings_within(records.timings, set(share.prompt_ids))
    is_timed = {AUTOREGRESSIVE, SPECULATIVE} <= {timing.mode for timing in timings}
    return {
        "num_prompts": len(share.prompt_ids),
        "acceptance": share.summarise(**bootstrap),
        "speed": compare_speed(timings, SPECULATIVE, **bootstrap) if is_timed else None,
    }


def _other_way(records: Tally, mode: str, bootstrap: Bootstrap) -> dict[str, Any]:
    acceptance, timed = records.acceptance(mode).summarise(**bootstrap), any(each.mode == mode for each in records.timings)
    speed = compare_speed(records.timings if timed else [], mode, **bootstrap)
    return {name: acceptance[name] for name in KEPT} | speed


def _against_draft(records: Tally, mode: str, draft: Mapping[str, Sequence[int]], bootstrap: Bootstrap) -> dict[str, Any]:
    """Describe a way without the draft, and the draft's ratios to it; `draft` are the draft's counts by prompt."""
    timings = [timing for timing in records.timings if timing.mode == mode]
    return {
        "num_speculative_tokens": records.num_drafts(mode),
        "decode_seconds": sum(timing.decode_seconds for timing in timings),
        "decode_tokens": sum(timing.num_tokens for timing in timings),
        **summarise_advantage(draft, records.acceptance(mode).per_prompt, records.timings, mode, **bootstrap),
    }


def _against_draft_alone(records: Tally, draft: Mapping[str, Sequence[int]], bootstrap: Bootstrap) -> dict[str, Any]:
    own = records.acceptance(WITH_LOOKUP)
    return summarise_advantage(own.per_prompt, draft, records.timings, SPECULATIVE, ours_mode=WITH_LOOKUP, **bootstrap)

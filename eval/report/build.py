"""From a run's records to its report: every number is computed here, by one pure function.

Numbers only, never formatted strings; units in names; `None` where a number is not available. `eval.report.schema` fixes the
form, `eval.report.tables` and `eval.report.page` render it, `eval.release` judges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.acceptance import Tally
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, WITH_LOOKUP
from eval.measure.suite import Suite
from eval.report.schema import SCHEMA_VERSION, Report, parse_report
from eval.speed import compare_speed, summarise_advantage, summarise_speed, timings_within
from eval.stats import detectable_percent


def build_report(*, suites: Sequence[tuple[Suite, Tally]], **sections: Any) -> Report:
    """Compute the report of one or several suites and what was decoded of each, the first being the one that it leads with.

    Answers may be missing, and the report says so. The other sections (target, draft, decode, losslessness, hardware, versions,
    git, command, warnings; quality, energy) are kept as they are given.
    """
    (first, records), *others = suites
    values = {
        "schema_version": SCHEMA_VERSION,
        **_suite(first, records),
        "suites": {suite.name: _suite(suite, own) for suite, own in others},
    }
    return parse_report({"git": None, "command": None, "warnings": []} | sections | values, "the report just built")


def _suite(suite: Suite, records: Tally) -> dict[str, Any]:
    if unknown := records.turns - set(suite.asked):
        raise ValueError("prompt {}, turn {} was decoded but is not among the prompts asked for".format(*min(unknown)))
    speculative = records.acceptance(SPECULATIVE)
    per_prompt = speculative.per_prompt
    committed, rounds = ([counts[column] for counts in per_prompt.values()] for column in (0, 1))
    others = [mode for mode in records.modes if mode not in (SPECULATIVE, WITH_LOOKUP)]
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
            **speculative.summarise(),
            "detectable_change_percent": detectable_percent(committed, rounds),
            "per_prompt": per_prompt,
        },
        "speed": summarise_speed(records.timings),
        "by_category": {category: _category(records, category) for category in records.categories},
        "baselines": {mode: _other_way(records, mode, SPECULATIVE, mode) for mode in others},
        "with_lookup": _other_way(records, WITH_LOOKUP, WITH_LOOKUP, SPECULATIVE) if WITH_LOOKUP in records.modes else None,
    }


def _category(records: Tally, category: str) -> dict[str, Any]:
    share = records.acceptance(SPECULATIVE, category)
    timings = timings_within(records.timings, set(share.counts))
    is_timed = {AUTOREGRESSIVE, SPECULATIVE} <= {timing.mode for timing in timings}
    return {
        "num_prompts": len(share.counts),
        "acceptance": share.summarise(),
        "speed": compare_speed(timings, SPECULATIVE) if is_timed else None,
    }


def _other_way(records: Tally, mode: str, above: str, below: str) -> dict[str, Any]:
    """Describe another way of decoding than the draft's, and the ratios of one mode over the other."""
    acceptance, timed = records.acceptance(mode).summarise(), any(each.mode == mode for each in records.timings)
    counts = {each: records.acceptance(each).per_prompt for each in (above, below)}
    return {
        "num_speculative_tokens": records.num_drafts(mode),
        **{name: acceptance[name] for name in ("tokens_per_target_step", "tokens_per_target_step_ci")},
        **compare_speed(records.timings if timed else [], mode),
        **summarise_advantage(records.timings, counts, above, below),
    }

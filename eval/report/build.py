"""From a run's records to its report: every number is computed here, by one pure function.

Numbers only, never formatted strings; units in names; `None` where a number is not available. `eval.report.schema` fixes the
form, `eval.report.markdown` and `eval.report.page` render it, `eval.release.checks` judges it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from eval.decoder.records import SPECULATIVE, WITH_LOOKUP, Generation
from eval.measure.suite import Suite
from eval.metrics.speed import compare_speed, summarise_advantage, summarise_speed, timings_within
from eval.metrics.tally import SAMPLES_A_SIDE, Tally
from eval.report.samples import Decode, spell_sample, tau_of
from eval.report.schema import SCHEMA_VERSION, Report, parse_report
from eval.stats.bootstrap import LEVEL
from eval.stats.significance import detectable_percent

# Of acceptance, what is kept of other ways than the draft's.
KEPT = ("tokens_per_target_step", "tokens_per_target_step_ci", "accepted_per_round", "draft_token_yield")


class Bootstrap(TypedDict):
    """The resampling behind every interval of a report."""

    samples: int
    seed: int


def build_report(
    *,
    suites: Sequence[tuple[Suite, Tally]],
    lossless: Mapping[str, Any],
    decode_tokens: Decode,
    bootstrap_samples: int,
    seed: int,
    command: Sequence[str] | None = None,
    warnings: Sequence[str] = (),
    **sections: Any,
) -> Report:
    """Compute the report of one or several suites and what was decoded of each, the first being the one that it leads with.

    Answers may be missing, and the report says so. The other sections (target, draft, decode, hardware, versions, git; quality,
    energy, rendered) are kept as they are given.
    """
    bootstrap: Bootstrap = {"samples": bootstrap_samples, "seed": seed}
    (first, records), *others = suites
    texts = {(prompt.prompt_id, turn): text for prompt in first.prompts for turn, text in enumerate(prompt.turns)}
    values = {
        "schema_version": SCHEMA_VERSION,
        "simulated": False,
        "warnings": list(warnings),
        "command": None if command is None else list(command),
        "statistics": {"bootstrap_samples": bootstrap_samples, "seed": seed, "level": LEVEL},
        **_suite(first, records, bootstrap),
        "suites": {suite.name: _suite(suite, own, bootstrap) for suite, own in others},
        "lossless": lossless,
        "samples": pick_samples(records.samples, texts, decode_tokens),
    }
    return parse_report({"git": None, "quality": None, "energy": None} | sections | values, "the report just built")


def _suite(suite: Suite, records: Tally, bootstrap: Bootstrap) -> dict[str, Any]:
    if unknown := records.places - set(suite.places):
        raise ValueError("prompt {}, turn {} was decoded but is not among the prompts asked for".format(*min(unknown)))
    speculative = records.of_mode(SPECULATIVE)
    per_prompt = speculative.per_prompt
    committed, rounds = ([counts[column] for counts in per_prompt.values()] for column in (0, 1))
    return {
        "prompts": {
            "suite": suite.name,
            "source": suite.source,
            "format": suite.format,
            "sha256": suite.sha256,
            "ids": suite.ids,
            "num_asked": len(suite.prompts),
            "num_turns": len(suite.places),
            "num_prompts": len(records.answered(suite.places)),  # all their turns, in every mode
            "num_trained_on": None if suite.trained_on is None else len(suite.trained_on),
            "categories": records.categories,
            "failed": [
                {name: getattr(each, name) for name in ("prompt_id", "turn", "mode", "stop_reason")} for each in records.failed
            ],
        },
        "acceptance": {
            **speculative.summarise(**bootstrap),
            "by_context_tokens": speculative.by_context(**bootstrap),
            "by_thinking": speculative.by_thinking(**bootstrap),
            "detectable_change_percent": detectable_percent([committed], [rounds]),
            "per_prompt": per_prompt,
        },
        "speed": summarise_speed(records.timings, keep_batches=True, **bootstrap),
        "by_category": {category: _category(records, category, bootstrap) for category in records.categories},
        "baselines": {
            mode: _baseline(records, mode, per_prompt, bootstrap)
            for mode in records.modes
            if mode not in (SPECULATIVE, WITH_LOOKUP)
        },
        "with_lookup": _with_lookup(records, per_prompt, bootstrap) if WITH_LOOKUP in records.modes else None,
    }


def _category(records: Tally, category: str, bootstrap: Bootstrap) -> dict[str, Any]:
    share = records.of_category(category)
    return {
        "num_prompts": len(share.sums),
        "acceptance": share.summarise(**bootstrap),
        "speed": summarise_speed(timings_within(records.timings, set(share.per_prompt)), **bootstrap),
    }


def _other_way(records: Tally, mode: str, bootstrap: Bootstrap) -> dict[str, Any]:
    acceptance, timed = records.of_mode(mode).summarise(**bootstrap), any(each.mode == mode for each in records.timings)
    speed = compare_speed(records.timings if timed else [], mode, **bootstrap)
    return {name: acceptance[name] for name in KEPT} | speed


def _baseline(records: Tally, mode: str, draft: Mapping[str, Sequence[int]], bootstrap: Bootstrap) -> dict[str, Any]:
    """Describe a way without the draft, and the draft's ratios to it; `draft` are the draft's counts by prompt."""
    timings = [timing for timing in records.timings if timing.mode == mode]
    return {
        **_other_way(records, mode, bootstrap),
        "num_speculative_tokens": records.num_drafts(mode),
        "decode_seconds": sum(timing.decode_seconds for timing in timings),
        "decode_tokens": sum(timing.num_tokens for timing in timings),
        **summarise_advantage(draft, records.of_mode(mode).per_prompt, records.timings, mode, **bootstrap),
    }


def _with_lookup(records: Tally, draft: Mapping[str, Sequence[int]], bootstrap: Bootstrap) -> dict[str, Any]:
    own = records.of_mode(WITH_LOOKUP)
    return {
        **_other_way(records, WITH_LOOKUP, bootstrap),
        "lookup": "suffix_lookup",
        **summarise_advantage(own.per_prompt, draft, records.timings, SPECULATIVE, ours_mode=WITH_LOOKUP, **bootstrap),
        **own.lookup_shares(),
    }


# --- sample answers -----------------------------------------------------------------------------------------------


def pick_samples(
    generations: Sequence[Generation], texts: Mapping[tuple[str, int], str], decode_tokens: Decode
) -> dict[str, list[dict[str, Any]]]:
    """Return the answers with the fewest and the most tokens per target step, token by token; the outermost come first.

    `texts` are what the user said, by prompt id and turn; later turns, counted from 1, are named with the prompt's id.
    """
    ranked = sorted((generation for generation in generations if generation.rounds), key=tau_of)
    count = min(SAMPLES_A_SIDE, len(ranked) // 2)
    return {
        side: [spell_sample(each, texts[each.prompt_id, each.turn], decode_tokens) for each in chosen]
        for side, chosen in (("worst", ranked[:count]), ("best", ranked[::-1][:count]))
    }

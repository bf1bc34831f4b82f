"""`report.json`: everything a run measured, computed from its records by one pure function.

Numbers only, never formatted strings; units in names; `None` where a number is not available. `eval.report_schema` fixes
the form, `eval.summary` and `eval.page` make text of it, `eval.gating` judges it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.files import write_json
from eval.acceptance import count_per_prompt, summarise_acceptance
from eval.intervals import LEVEL
from eval.records import SPECULATIVE, Divergence, Generation, Timing
from eval.report_schema import SCHEMA_VERSION, check_report
from eval.samples import pick_samples
from eval.speed import compare_speed, summarise_speed, timings_within

FAILED = "non_finite"


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts that were asked for."""

    source: str
    sha256: str
    texts: Mapping[str, str]  # prompt id -> what is shown of the prompt; the keys are all ids asked for


def build_report(
    *,
    target: Mapping[str, Any],
    draft: Mapping[str, Any],
    decode: Mapping[str, Any],
    prompts: PromptSet,
    generations: Sequence[Generation],
    timings: Sequence[Timing],
    lossless: Mapping[str, Any],
    decode_tokens: Callable[[Sequence[int]], str],
    hardware: Mapping[str, Any],
    versions: Mapping[str, Any],
    git: Mapping[str, Any] | None = None,
    command: Sequence[str] | None = None,
    warnings: Sequence[str] = (),
    bootstrap_samples: int = 2000,
    seed: int = 0,
    simulated: bool = False,
) -> dict[str, Any]:
    """Compute the report.

    Args:
        target, draft, decode, hardware, versions, git, command: descriptions, kept as they are.
        prompts: what was asked for; answers may be missing, and that shows.
        generations: at most one a mode and prompt. Where a run was repeated, those of the first repeat.
        timings: of all repeats; empty where nothing was timed.
        lossless: `verdict`, `checked_prompts`, `divergences` (`Divergence` or dict), and whatever else the check found.
        decode_tokens: turns token ids into text, special tokens included.
        warnings: sentences the reader must see, such as an allowed mismatch of the target.
        bootstrap_samples, seed: of all intervals.
        simulated: acceptance was drawn instead of measured.

    Raises:
        ValueError: records contradict each other, or a description lacks a field that `eval.report_schema` requires.
    """
    modes = _by_mode(generations, prompts)
    bootstrap = {"samples": bootstrap_samples, "seed": seed}
    report = {
        "schema_version": SCHEMA_VERSION,
        "simulated": simulated,
        "warnings": list(warnings),
        "command": None if command is None else list(command),
        "target": dict(target),
        "draft": dict(draft),
        "decode": dict(decode),
        "hardware": dict(hardware),
        "versions": dict(versions),
        "git": None if git is None else dict(git),
        "statistics": {"bootstrap_samples": bootstrap_samples, "seed": seed, "level": LEVEL},
        "prompts": _prompts(prompts, modes),
        **_measurements(modes, timings, decode["num_speculative_tokens"], bootstrap),
        "lossless": {**lossless, "divergences": [_as_dict(divergence) for divergence in lossless["divergences"]]},
        "samples": pick_samples(modes[SPECULATIVE], prompts.texts, decode_tokens),
    }
    return check_report(report, "the report just built")


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Check a report and write it.

    Raises:
        InputError: it is no report, or the file cannot be written.
    """
    write_json(path, check_report(dict(report), f"report for {path}"))


def _by_mode(generations: Sequence[Generation], prompts: PromptSet) -> dict[str, list[Generation]]:
    """Sort generations by mode, in the order of the records."""
    modes: dict[str, list[Generation]] = {SPECULATIVE: []}
    for (mode, prompt_id), count in Counter((each.mode, each.prompt_id) for each in generations).items():
        if count > 1:
            raise ValueError(f"{count} generations of prompt {prompt_id} in mode {mode}; hand in those of one repeat")
        if prompt_id not in prompts.texts:
            raise ValueError(f"prompt {prompt_id} was decoded but is not among the prompts asked for")
    for generation in generations:
        modes.setdefault(generation.mode, []).append(generation)
    return modes


def _prompts(prompts: PromptSet, modes: Mapping[str, Sequence[Generation]]) -> dict[str, Any]:
    """Describe what was asked and what came of it; a prompt counts when every mode answered it without failing."""
    failed = [generation for own in modes.values() for generation in own if generation.stop_reason == FAILED]
    answered = set.intersection(*({generation.prompt_id for generation in own} for own in modes.values()))
    return {
        "source": prompts.source,
        "sha256": prompts.sha256,
        "ids": list(prompts.texts),
        "num_asked": len(prompts.texts),
        "num_prompts": len(answered - {generation.prompt_id for generation in failed}),
        "categories": dict(Counter(generation.category for generation in modes[SPECULATIVE])),
        "failed": [
            {"prompt_id": generation.prompt_id, "mode": generation.mode, "stop_reason": generation.stop_reason}
            for generation in failed
        ],
    }


def _measurements(
    modes: Mapping[str, Sequence[Generation]], timings: Sequence[Timing], num_positions: int, bootstrap: Mapping[str, int]
) -> dict[str, Any]:
    """Compute the sections that are numbers: over all prompts, by category, and of the baselines."""
    speculative = modes[SPECULATIVE]
    acceptance = summarise_acceptance(speculative, num_positions, **bootstrap)
    baselines = {mode: own for mode, own in modes.items() if mode != SPECULATIVE}
    return {
        "acceptance": {**acceptance, "per_prompt": count_per_prompt(speculative)},
        "speed": summarise_speed(timings, **bootstrap),
        "by_category": _by_category(speculative, timings, num_positions, bootstrap),
        "baselines": {mode: _baseline(own, timings, num_positions, bootstrap) for mode, own in baselines.items()},
    }


def _by_category(
    generations: Sequence[Generation], timings: Sequence[Timing], num_positions: int, bootstrap: Mapping[str, int]
) -> dict[str, Any]:
    sections = {}
    for category in dict.fromkeys(generation.category for generation in generations):
        own = [generation for generation in generations if generation.category == category]
        own_timings = timings_within(timings, {generation.prompt_id for generation in own})
        sections[category] = {
            "num_prompts": len(own),
            "acceptance": summarise_acceptance(own, num_positions, **bootstrap),
            "speed": summarise_speed(own_timings, **bootstrap),
        }
    return sections


def _baseline(
    generations: Sequence[Generation], timings: Sequence[Timing], num_positions: int, bootstrap: Mapping[str, int]
) -> dict[str, Any]:
    mode = generations[0].mode
    acceptance = summarise_acceptance(generations, num_positions, **bootstrap)
    own = [timing for timing in timings if timing.mode == mode]
    kept = ("tokens_per_target_step", "tokens_per_target_step_ci", "accepted_per_round", "draft_token_yield")
    return {
        **{name: acceptance[name] for name in kept},
        "decode_seconds": sum(timing.decode_seconds for timing in own),
        "decode_tokens": sum(timing.num_tokens for timing in own),
        **compare_speed(timings if own else [], mode, **bootstrap),
    }


def _as_dict(divergence: Divergence | Mapping[str, Any]) -> dict[str, Any]:
    return asdict(divergence) if isinstance(divergence, Divergence) else dict(divergence)

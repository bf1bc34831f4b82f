"""Is this draft better than the previous one? Two reports on the same prompts, compared prompt by prompt. Torch-free.

The two may be a draft and its predecessor, or two artifacts. tau is compared by the counts of each prompt; speed by the
decode speedup over plain decoding in the same run, from the seconds of each batch, because two runs at different times share
no other clock. Whether target and settings are the same is for `eval.report.compare` to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.runtime.errors import InputError
from eval.report.schema import Report, SuiteSection
from eval.report.sections import BatchSection
from eval.report.text import short
from eval.stats.paired import Change, Side, compare_sides

MAX_NAMED = 3  # prompts that an error message names

Batches = Mapping[tuple[str, ...], BatchSection]


@dataclass(frozen=True, kw_only=True)
class PairedReports:
    """Two reports on the prompts that both answered; a change is `None` where one of them did not measure the number."""

    num_prompts: int
    only_ours: tuple[str, ...]
    only_theirs: tuple[str, ...]
    tokens_per_target_step: Change | None
    decode_speedup: Change | None
    batches_left_out: int  # of both reports, for speed: decoded together with others than in the other report


def compare_reports(report: Report, other: Report, *, allow_unequal: bool = False, suite: str | None = None) -> PairedReports:
    """Compare a report (ours) with another (theirs) on the prompts that both have, of the first suite or a further one.

    The bootstrap's settings are the first's. With `allow_unequal`, prompts that only one of them has are listed, not refused.

    Raises:
        InputError: the prompts come from different files, or are not the same ones, or none is in both; or one of the reports
            lacks the suite.
    """
    settings = report.statistics
    one, another = _section(report, suite), _section(other, suite)
    if one.prompts.sha256 != another.prompts.sha256:
        files = " and ".join(f"{each.prompts.source} ({short(each.prompts.sha256)})" for each in (one, another))
        raise InputError(f"the reports cannot be paired by prompt: their prompts come from {files}, which differ")
    ours, theirs = one.acceptance.per_prompt, another.acceptance.per_prompt
    common = [prompt_id for prompt_id in ours if prompt_id in theirs]
    only_ours = tuple(each for each in ours if each not in theirs)
    only_theirs = tuple(each for each in theirs if each not in ours)
    if not common or ((only_ours or only_theirs) and not allow_unequal):
        raise InputError(_unequal(len(common), only_ours, only_theirs))
    batches, other_batches = _batches(one), _batches(another)
    common_batches = [batch for batch in batches if batch in other_batches]
    bootstrap: dict[str, Any] = {"samples": settings.bootstrap_samples, "seed": settings.seed, "level": settings.level}
    return PairedReports(
        num_prompts=len(common),
        only_ours=only_ours,
        only_theirs=only_theirs,
        tokens_per_target_step=compare_sides(_tau_side(ours, common), _tau_side(theirs, common), **bootstrap),
        decode_speedup=compare_sides(
            _speed_side(batches, common_batches), _speed_side(other_batches, common_batches), **bootstrap
        ),
        batches_left_out=len(batches) + len(other_batches) - 2 * len(common_batches),
    )


def _section(report: Report, suite: str | None) -> Report | SuiteSection:
    if suite is None:
        return report
    if suite not in report.suites:
        raise InputError(f"one of the reports has no suite {suite!r}; evaluate both on the same suites")
    return report.suites[suite]


def _unequal(num_common: int, only_ours: Sequence[str], only_theirs: Sequence[str]) -> str:
    missing = [
        f"{len(prompts)} only in the {name} ({', '.join(prompts[:MAX_NAMED])}{', ...' * (len(prompts) > MAX_NAMED)})"
        for name, prompts in (("first", only_ours), ("second", only_theirs))
        if prompts
    ]
    found = "; ".join(missing) or "neither answered any"
    return (
        f"the reports cannot be paired by prompt: {num_common} prompts are in both, {found}; evaluate both on the same prompts"
    )


def _batches(section: Report | SuiteSection) -> Batches:
    found = (section.speed.per_batch if section.speed else None) or []
    return {tuple(batch.prompt_ids): batch for batch in found}


def _tau_side(counts: Mapping[str, Sequence[int]], prompt_ids: Sequence[str]) -> Side:
    committed, rounds = ([counts[prompt_id][column] for prompt_id in prompt_ids] for column in (0, 1))
    return Side(above=(committed,), below=(rounds,))


def _speed_side(batches: Batches, common: Sequence[tuple[str, ...]]) -> Side:
    """Return (plain seconds / plain tokens) / (seconds / tokens)."""
    plain_seconds, plain_tokens = ([batches[batch].autoregressive[column] for batch in common] for column in (0, 1))
    seconds, tokens = ([batches[batch].speculative[column] for batch in common] for column in (0, 1))
    return Side(above=(plain_seconds, tokens), below=(plain_tokens, seconds))

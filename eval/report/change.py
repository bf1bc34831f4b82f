"""How tau and the decode speedup changed from one report to another on the same prompts. Torch-free.

tau is compared by the counts of each prompt. Speed is compared by the decode speedup over plain decoding in the same run, from
the seconds of each batch, because two runs at different times share no other clock. Whether target and settings are the same is
for `eval.report.differences` to say.
"""

from __future__ import annotations

from configs.runtime.errors import InputError
from eval.report.schema import Report, SuiteSection
from eval.report.sections import BatchSection
from eval.report.text import short
from eval.stats.change import Change, Side, compare_sides


def tau_change(report: Report, other: Report, suite: str | None = None) -> Change | None:
    """Return how tokens per target step changed from `other` to `report`, on the prompts that both answered.

    Args:
        report, other: ours and theirs; ours has the settings of the bootstrap.
        suite: a further suite of both; None: the first.

    Raises:
        InputError: the prompts come from different files, none was answered in both, or a report lacks the suite.
    """
    ours, theirs = _sections(report, other, suite)
    common = [prompt_id for prompt_id in ours.acceptance.per_prompt if prompt_id in theirs.acceptance.per_prompt]
    if not common:
        raise InputError("the reports cannot be compared: they have no answered prompt in common")
    sides = []
    for section in (ours, theirs):
        counts = [section.acceptance.per_prompt[prompt_id] for prompt_id in common]
        sides.append(Side(above=([committed for committed, _ in counts],), below=([rounds for _, rounds in counts],)))
    return compare_sides(*sides, samples=report.statistics.bootstrap_samples, seed=report.statistics.seed)


def speed_change(report: Report, other: Report, suite: str | None = None) -> Change | None:
    """Return how the decode speedup changed; None where the two did not time the same batches. See `tau_change`."""
    ours, theirs = map(_batches, _sections(report, other, suite))
    if not ours or ours.keys() != theirs.keys():
        return None
    sides = []
    for batches in (ours, theirs):
        plain, drafted = ([getattr(batches[key], mode) for key in ours] for mode in ("autoregressive", "speculative"))
        plain_seconds, plain_tokens = zip(*plain, strict=True)
        seconds, tokens = zip(*drafted, strict=True)
        sides.append(Side(above=(plain_seconds, tokens), below=(plain_tokens, seconds)))
    return compare_sides(*sides, samples=report.statistics.bootstrap_samples, seed=report.statistics.seed)


def _sections(report: Report, other: Report, suite: str | None) -> list[Report | SuiteSection]:
    found: list[Report | SuiteSection] = []
    for each in (report, other):
        if suite is not None and suite not in each.suites:
            raise InputError(f"one of the reports has no suite {suite!r}; evaluate both on the same suites")
        found.append(each if suite is None else each.suites[suite])
    if found[0].prompts.sha256 != found[1].prompts.sha256:
        files = " and ".join(f"{each.prompts.source} ({short(each.prompts.sha256)})" for each in found)
        raise InputError(f"the reports cannot be compared: their prompts come from {files}, which differ")
    return found


def _batches(section: Report | SuiteSection) -> dict[tuple[str, ...], BatchSection]:
    found = (section.speed.per_batch if section.speed else None) or []
    return {tuple(batch.prompt_ids): batch for batch in found}

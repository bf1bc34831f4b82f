"""A report's tables, for its page, a terminal and its Markdown summary, and text from outside as safe Markdown. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.runtime.terminal import one_line, printable
from eval.report.schema import EnergySection, PredictedSection, QualitySection, Report
from eval.report.text import (
    VERDICTS,
    by_suite,
    cell,
    failed_requests,
    fastest_free,
    headline,
    interval,
    learning_note,
    lossless_detail,
    milliseconds_per_token,
    number,
    percent,
    settings,
    short,
    speedup,
    tau,
    times,
    warnings,
)

Row = tuple[str, ...]

PROVENANCE = ("target", "draft", "decode", "hardware", "versions", "git")  # sections that describe the run
# Label, section, field and form of the numbers that a report leads with.
NUMBERS = (
    ("decode speedup", "speed", "decode_speedup", times),
    ("end-to-end speedup", "speed", "end_to_end_speedup", times),
    ("tokens per target step (τ)", "acceptance", "tokens_per_target_step", number),
    ("τ, mean over prompts", "acceptance", "tokens_per_target_step_macro", number),
    ("acceptance rate (α)", "acceptance", "overlap_alpha", number),
    ("accepted drafts per round", "acceptance", "accepted_per_round", number),
    ("accepted share of all drafts", "acceptance", "draft_token_yield", percent),
    ("mass outside the draft's vocabulary", "acceptance", "uncovered_mass", percent),
    ("smallest detectable change in τ (%)", "acceptance", "detectable_change_percent", number),
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells of text; the first column names the row."""

    title: str  # heading on the page
    header: Row
    rows: Sequence[Row]
    note: str = ""  # what to read before the table


def report_tables(report: Report) -> list[Table]:
    """Return a report's tables in reading order; one with nothing to show is left out."""
    predicted = None if report.speed is None else report.speed.predicted
    tables = [
        Table(title="Numbers", header=("", "value", "95 % interval"), rows=list(_numbers(report))),
        _suites(report),
        _positions(report),
        _phases(report),
        *([] if predicted is None else [_predicted(predicted)]),
        _categories(report),
        _ways(report),
        *([] if report.quality is None else [_quality(report.quality)]),
        *([] if report.energy is None else [_energy(report.energy)]),
        _failures(report),
    ]
    return [table for table in tables if table.rows or table.note]


def as_text(table: Table) -> str:
    """Return a table's header and rows for a terminal, in columns."""
    rows = [tuple(map(one_line, row)) for row in (table.header, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def flat_facts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every leaf of nested descriptions, without those that are off or empty."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from flat_facts(child, f"{name} {key}".strip())
    elif isinstance(value, list) and any(isinstance(child, Mapping) for child in value):
        for place, child in enumerate(value, 1):
            yield from flat_facts(child, f"{name} {place}")
    elif value is not None and value != []:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _numbers(report: Report) -> Iterator[Row]:
    for label, section, field, form in NUMBERS:
        value, bounds = getattr(report, section).interval_of(field) if getattr(report, section) else (None, None)
        if value is not None:
            shown = interval([100 * each for each in bounds], 0) if bounds and form is percent else interval(bounds)
            yield label, form(value), shown


def _suites(report: Report) -> Table:
    rows = []
    for name, section in by_suite(report).items():
        free, both = fastest_free(section), section.with_lookup
        rival = "" if free is None else f"{free[0]} {speedup(free[1])}"
        rows.append(
            (name, str(section.prompts.num_prompts), tau(section.acceptance), speedup(section.speed), speedup(both), rival)
        )
    header = ("suite", "prompts", "τ", "decode speedup", "with lookup", "fastest without training")
    note = f"All other tables are of {rows[0][0]}. {learning_note(report)}".rstrip() if rows else ""
    return Table(title="By suite", header=header, rows=rows, note=note)


def _positions(report: Report) -> Table:
    acceptance = report.acceptance
    columns = zip(
        acceptance.position_conditional, acceptance.position_survival, acceptance.overlap_alpha_by_position, strict=True
    )
    rows = [
        (str(position), percent(conditional), percent(survival), number(overlap))
        for position, (conditional, survival, overlap) in enumerate(columns, 1)
    ]
    header = ("draft position", "given all before", "survival", "overlap α")
    return Table(title="By draft position", header=header, rows=rows)


def _phases(report: Report) -> Table:
    rows: list[Row] = []
    if (speed := report.speed) is not None:
        labels = {"draft_seconds": "draft", "verify_seconds": "target", "sample_seconds": "accept and draw"}
        for phase, seconds in speed.phases.items():
            rows.append((labels.get(phase, "rest"), number(seconds), percent(speed.phase_shares[phase])))
        rows.append(("decode", number(speed.decode_seconds_speculative), ""))
        rows.append(("plain decoding", number(speed.decode_seconds_autoregressive), ""))
    return Table(title="Time", header=("phase", "seconds", "share"), rows=rows, note=milliseconds_per_token(report))


def _predicted(predicted: PredictedSection) -> Table:
    speedups = {(each.batch_size, each.num_speculative_tokens): times(each.decode_speedup) for each in predicted.settings}
    batches, drafts = (sorted({sizes[place] for sizes in speedups}) for place in (0, 1))
    header = ("batch size", *(f"{each} draft{'s' * (each > 1)}" for each in drafts))
    rows = [(str(batch), *(speedups[batch, each] for each in drafts)) for batch in batches]
    timed = ", ".join(map(str, sorted({each.batch_size for each in predicted.sweep})))
    return Table(title="Predicted decode speedup", header=header, rows=rows, note=f"Timed were batches of {timed}.")


def _categories(report: Report) -> Table:
    rows = [
        (name, str(each.num_prompts), tau(each.acceptance), cell(each.acceptance, "overlap_alpha"), speedup(each.speed))
        for name, each in report.by_category.items()
    ]
    return Table(title="By category", header=("category", "prompts", "τ", "α", "decode speedup"), rows=rows)


def _ways(report: Report) -> Table:
    rows: list[Row] = [("this draft", tau(report.acceptance), speedup(report.speed), "", "")]
    drawn = "drawn" if report.decode.verification == "one_hot" else "its likeliest tokens"
    if (both := report.with_lookup) is not None:
        rows.append(("suffix_lookup, else this draft", tau(both), speedup(both), "", ""))
    others = {} if report.other_verification is None else {f"this draft, {drawn}": report.other_verification}
    for name, each in (others | report.baselines).items():
        ratios = (cell(each, ratio, times) for ratio in ("tokens_per_target_step_ratio", "decode_speed_ratio"))
        rows.append((name, tau(each), speedup(each), *ratios))
    header = ("way of decoding", "τ", "decode speedup", "this draft's τ over it", "this draft's speed over it")
    return Table(title="Other ways of decoding", header=header, rows=rows, note=learning_note(report))


def _quality(quality: QualitySection) -> Table:
    rows: list[Row] = []
    if (one := quality.perplexity) is not None:
        rows.append(("perplexity", cell(one, "autoregressive"), cell(one, "speculative"), cell(one, "ratio", times, 3)))
    if (score := quality.exact_match) is not None:
        columns = ("autoregressive", "speculative", "difference")
        rows.append(("exact match", *(cell(score, each, digits=3) for each in columns)))
    note = f"{quality.num_identical} of {quality.num_answers} answers are the same token for token."
    for count, outcome in ((quality.num_cut, "reached the limit of their length"), (quality.num_failed, "failed")):
        note += f" {count} {outcome}." if count else ""
    return Table(title="Quality of the answers", header=("quality", "plain", "speculative", "change"), rows=rows, note=note)


def _energy(energy: EnergySection) -> Table:
    if (one := energy.joules_per_token) is None:
        return Table(title="Energy", header=("",), rows=[], note=f"Not available: {energy.reason}.")
    row = ("joules per token", cell(one, "autoregressive"), cell(one, "speculative"), cell(one, "ratio", times))
    return Table(title="Energy", header=("energy", "plain", "speculative", "ratio"), rows=[row])


def _failures(report: Report) -> Table:
    rows = [(each.prompt_id, each.mode, each.stop_reason) for each in failed_requests(report)]
    return Table(title="Failed requests", header=("failed prompt", "mode", "reason"), rows=rows)


# --- Markdown -------------------------------------------------------------------------------------------------------


# By entities where a backslash would mean something else to some readers.
MARKUP = str.maketrans({"&": "&amp;", "<": "&lt;", "\\": "&#92;", "`": "'", "[": "\\[", "*": "\\*", "~": "\\~", "$": "\\$"})
ADDRESS = re.compile(r"://|(?<=www)\.|@", re.IGNORECASE)


def render_markdown(report: Report) -> str:
    """Return the summary of a report."""
    blocks = [
        f"## {escape(headline(report))}",
        *(f"> **Warning:** {escape(warning)}" for warning in warnings(report)),
        f"**{VERDICTS[report.lossless.verdict]}**: {escape(lossless_detail(report))}.",
    ]
    for each in report_tables(report):
        blocks.append(f"### {each.title}")
        blocks += [escape(each.note)] if each.note else []
        blocks += [as_markdown_table(each)] if each.rows else []
    made_by = f"Target {code(report.target.name)}, draft {code(report.draft.path)} ({escape(short(report.draft.sha256))})"
    return "\n\n".join([*blocks, f"{made_by}, {escape(settings(report))}."]) + "\n"


def as_markdown_table(shown: Table, *, numbers: bool = True) -> str:
    """Return a table of text from outside; see `table`."""
    return table(shown.header, [[escape(cell) for cell in row] for row in shown.rows], numbers=numbers)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """Return a Markdown table of cells in Markdown; all but the first column are to the right where they are numbers."""
    rule = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
    lines = ([cell.replace("|", "\\|") for cell in cells] for cells in (header, rule, *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def escape(text: str) -> str:
    """Return a text from outside as Markdown that reads as this text on one line, in a paragraph or a cell of a table."""
    return ADDRESS.sub(lambda found: f"&#{ord(found[0][0])};{found[0][1:]}", one_line(text).translate(MARKUP))


def code(text: str) -> str:
    """Return a text from outside as inline code; in a table only by `escape`, whose cells are cut before code is read."""
    return f"`{one_line(text).replace('`', chr(39)) or ' '}`"


def code_block(text: str, language: str) -> str:
    """Return lines from outside as a block of code, fenced by more backticks than stand in them."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(text)}\n{fence}"

"""A report as a short Markdown text, fit for a pull request or a model card. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from configs.runtime.terminal import one_line, printable
from eval.report.answer_sections import EnergySection, QualitySection
from eval.report.schema import BaselineSection, Report, WithLookupSection
from eval.report.sections import AcceptanceSection, PredictedSection, WholeAcceptanceSection
from eval.report.text import (
    VERDICTS,
    by_suite,
    fastest_free,
    headline,
    interval,
    lookup_gain,
    lossless_detail,
    milliseconds_a_token,
    number,
    percent,
    settings,
    short,
    speedup_of,
    times,
    warnings,
    weakest_category,
)

# By entities where a backslash would mean something else to some readers.
MARKUP = str.maketrans({"&": "&amp;", "<": "&lt;", "\\": "&#92;", "`": "'", "[": "\\[", "*": "\\*", "~": "\\~", "$": "\\$"})
ADDRESS = re.compile(r"://|(?<=www)\.|@", re.IGNORECASE)


def render_markdown(report: Report) -> str:
    """Return the summary of a report."""
    acceptance, speed = report.acceptance, report.speed
    predicted = None if speed is None else speed.predicted
    blocks = [
        f"## {escape(headline(report))}",
        *(f"> **Warning:** {escape(warning)}" for warning in warnings(report)),
        table(
            ("", "value", "95 % interval"),
            [
                _speedup_row("decode speedup", report, "decode_speedup"),
                (
                    "decode speedup predicted by the cost model",
                    times(None if predicted is None else predicted.decode_speedup),
                    "",
                ),
                _speedup_row("end-to-end speedup", report, "end_to_end_speedup"),
                (
                    "tokens per target step (τ)",
                    number(acceptance.tokens_per_target_step),
                    interval(acceptance.tokens_per_target_step_ci),
                ),
                ("acceptance rate (α)", number(acceptance.overlap_alpha), interval(acceptance.overlap_alpha_ci)),
            ],
        ),
        *([escape(pace)] if (pace := milliseconds_a_token(report)) else []),
        *([] if predicted is None else [_best_settings(predicted)]),
        *([_suite_table(report)] if report.suites else []),
        f"**{VERDICTS[report.lossless.verdict]}**: {escape(lossless_detail(report))}.",
        table(("category", "prompts", "τ", "95 % interval", "decode speedup"), _category_rows(report)),
        *([escape(weakest)] if (weakest := weakest_category(report)) else []),
        table(("draft position", "given all before", "survival", "overlap α"), _position_rows(acceptance)),
        table(("tokens before a round", "rounds", "τ", "95 % interval"), _length_rows(acceptance)),
        table(("way of decoding", "τ", "decode speedup", "95 % interval"), _baseline_rows(report)),
        *([escape(gain)] if (gain := lookup_gain(report)) else []),
        *([] if report.quality is None else [_quality_table(report.quality)]),
        *([] if report.energy is None else [_energy_table(report.energy)]),
        f"Target {code(report.target.name)}, draft {code(report.draft.path)} "
        f"({escape(short(report.draft.sha256))}), {escape(settings(report))}.",
    ]
    return "\n\n".join(blocks) + "\n"


def _speedup_row(label: str, report: Report, name: str) -> tuple[str, ...]:
    value, bounds = speedup_of(report, name)
    return (label, times(value), interval(bounds))


def _best_settings(predicted: PredictedSection) -> str:
    """Say which settings the cost model would choose."""
    best, largest = predicted.best_num_speculative_tokens, predicted.break_even_batch_size
    fastest = "no number of drafts is expected to pay" if best is None else f"the fastest is expected at {best} a round"
    timed = sorted({each.batch_size for each in predicted.sweep})
    up_to = "every timed batch" if largest is None else f"a batch of {largest}"
    by = f" (by forwards timed at batches of {', '.join(map(str, timed))})" if timed else ""
    return f"Drafts at this batch size: {fastest}" + (f"; drafting pays up to {up_to}{by}." if largest != 0 else ".")


def _category_rows(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            escape(name),
            str(section.num_prompts),
            number(section.acceptance.tokens_per_target_step),
            interval(section.acceptance.tokens_per_target_step_ci),
            times(None if section.speed is None else section.speed.decode_speedup),
        )
        for name, section in report.by_category.items()
    ]


def _position_rows(acceptance: AcceptanceSection) -> list[tuple[str, ...]]:
    columns = zip(
        acceptance.position_conditional, acceptance.position_survival, acceptance.overlap_alpha_by_position, strict=True
    )
    return [
        (str(position), percent(conditional), percent(survival), number(overlap))
        for position, (conditional, survival, overlap) in enumerate(columns, 1)
    ]


def _length_rows(acceptance: WholeAcceptanceSection) -> Iterator[tuple[str, ...]]:
    for where, classes in (("context", acceptance.by_context_tokens), ("answer", acceptance.by_answer_tokens)):
        for each in classes:
            bounds = interval(each.tokens_per_target_step_ci)
            span = f"{where}, {each.from_tokens} to {each.to_tokens - 1}"
            yield (span, str(each.num_rounds), number(each.tokens_per_target_step), bounds)


def _suite_table(report: Report) -> str:
    rows = []
    for name, section in by_suite(report).items():
        tau, speed = section.acceptance.interval_of("tokens_per_target_step"), speedup_of(section)
        free, both = fastest_free(section), section.with_lookup
        rows.append(
            (
                escape(name),
                str(section.prompts.num_prompts),
                f"{number(tau[0])} {interval(tau[1])}",
                f"{times(speed[0])} {interval(speed[1])}",
                times(None if both is None else both.decode_speedup),
                "" if free is None else f"{escape(free[0])} {times(free[1].decode_speedup)}",
            )
        )
    return table(("suite", "prompts", "τ", "decode speedup", "with lookup", "fastest without training"), rows)


def _baseline_rows(report: Report) -> Iterator[tuple[str, ...]]:
    yield ("this draft", number(report.acceptance.tokens_per_target_step), *_speedup_row("", report, "decode_speedup")[1:])
    ways: dict[str, BaselineSection | WithLookupSection] = {**report.baselines}
    if (both := report.with_lookup) is not None:
        ways = {f"{both.lookup}, then this draft": both, **ways}
    for name, section in ways.items():
        speedup = (times(section.decode_speedup), interval(section.decode_speedup_ci))
        yield (escape(name), number(section.tokens_per_target_step), *speedup)


def _quality_table(quality: QualitySection) -> str:
    rows: list[tuple[str, ...]] = []
    if (one := quality.perplexity) is not None:
        values = (number(one.autoregressive), number(one.speculative), times(one.ratio, 3))
        rows.append(("perplexity", *values, interval(one.ratio_ci, 3)))
    for name, score in quality.scores.items():
        scores = (number(each, 3) for each in (score.autoregressive, score.speculative, score.difference))
        rows.append((escape(name), *scores, interval(score.difference_ci, 3)))
    if (distance := quality.feature_distance) is not None:
        rows.append(
            ("Fréchet distance from the references", number(distance.autoregressive), number(distance.speculative), "", "")
        )
        rows.append(("Fréchet distance from plain answers", "", number(distance.between), "", ""))
    return table(("quality", "plain", "speculative", "change", "95 % interval"), rows)


def _energy_table(energy: EnergySection) -> str:
    if energy.source is None:
        return f"Energy: not available, {escape(energy.reason or '')}."
    row = (
        f"joules per token ({escape(energy.source)})",
        number(energy.joules_per_token_autoregressive),
        number(energy.joules_per_token_speculative),
        times(energy.joules_per_token_ratio),
        interval(energy.joules_per_token_ratio_ci),
    )
    return table(("energy", "plain", "speculative", "ratio", "95 % interval"), [row])


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """Return a Markdown table of cells in Markdown; all but the first column are to the right where they are numbers."""
    rule = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
    lines = ([cell.replace("|", "\\|") for cell in cells] for cells in (header, rule, *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def escape(text: str) -> str:
    """Return a text from outside as Markdown that reads as this text on one line, in a paragraph or a cell of a table.

    It holds no markup, HTML or link; not even an address, which readers of Markdown turn into a link by themselves.
    """
    return ADDRESS.sub(lambda found: f"&#{ord(found[0][0])};{found[0][1:]}", one_line(text).translate(MARKUP))


def code(text: str) -> str:
    """Return a text from outside as inline code; in a table only by `escape`, whose cells are cut before code is read."""
    return f"`{one_line(text).replace('`', chr(39)) or ' '}`"


def code_block(text: str, language: str) -> str:
    """Return lines from outside as a block of code, fenced by more backticks than stand in them."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(text)}\n{fence}"

"""A report as Markdown for a pull request or a model card, and text from outside made safe for it. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from configs.runtime.terminal import one_line, printable
from eval.report.schema import Report
from eval.report.tables import Table, report_tables
from eval.report.text import VERDICTS, headline, lossless_detail, settings, short, warnings

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
        if each.in_summary:
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

"""Fill the documents' tables from docs/results: `make tables`.

Whatever stands between `<!-- table: NAME -->` and `<!-- end -->` is replaced by the ratios and the rows of
docs/results/NAME.json, so that no figure is ever copied by hand. A part of a file is shown by a YAML mapping behind the name,
such as `<!-- table: heads {rows: {suite: [home]}, columns: [family, tau]} -->`:

    rows     the rows to show, by the values that they may have in some columns
    columns  of these; without it, all

`--set report=runs/demo/eval/report.json` first makes demo.json of the demo's report.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from configs.runtime.command import DONE, run_command
from configs.runtime.errors import InputError
from configs.runtime.files import CHECKOUT, read_json, read_text, write_text
from configs.schema.base import Settings
from scripts.bench.harness import RESULTS, by_suite, figures, write_results

TABLE = re.compile(r"<!-- table: ([\w-]+)( \{[^\n]*\})? -->\n.*?(?=<!-- end -->)", re.DOTALL)
BOUNDS = ("_low", "_high")
NOT_AVAILABLE = "–"


class TablesConfig(Settings):
    """`python -m scripts.bench.tables`: the tables of README.md and the pages of docs/."""

    report: str | None = None  # of the demo, whose figures go into demo.json first


class Part(Settings):
    """What of a results file a table shows."""

    rows: dict[str, list[Any]] = {}  # by the values that they may have in some columns
    columns: list[str] | None = None  # of these rows; None: all


def update_tables(config: TablesConfig) -> int:
    if config.report is not None:
        record_demo(Path(config.report))
    for path in documents():
        text = read_text(path, "document")
        if (filled := fill_tables(text, RESULTS)) != text:
            write_text(path, filled)
    return DONE


def record_demo(path: Path) -> None:
    report, rows = read_json(path, "report"), []
    for suite, section in by_suite(report).items():
        named = {"draft": report["draft"]["kind"], "suite": suite, "prompts": section["prompts"]["num_prompts"]}
        own = figures(section["acceptance"], section["speed"])
        del own["alpha_by_position"]
        free = {name: each["decode_speedup"] or 0 for name, each in section["baselines"].items() if name != "autoregressive"}
        fastest = max(free, key=lambda name: free[name], default=None)
        both = section["with_lookup"] and section["with_lookup"]["decode_speedup"]
        compared = {"with_lookup_speedup": both, "fastest_untrained": fastest}
        compared["fastest_untrained_speedup"] = free.get(str(fastest))
        rows.append(named | own | compared | {"lossless": report["lossless"]["verdict"]})
    write_results(RESULTS / "demo.json", "demo", rows=rows, ratios={}, git=report["git"])  # the commit that was measured


def documents() -> list[Path]:
    return [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]


def fill_tables(document: str, results: Path) -> str:
    """Return a Markdown document with its tables made anew from the benchmarks' files in a folder."""
    return TABLE.sub(
        lambda match: f"<!-- table: {match[1]}{match[2] or ''} -->\n\n{_content(results, match[1], match[2])}\n\n", document
    )


def _content(results: Path, name: str, given: str | None) -> str:
    content = read_json(results / f"{name}.json", "benchmark results")
    rows, ratios, summary = content["rows"], content["ratios"], content.get("summary")
    if given is not None:
        rows, summary = _chosen(rows, Part.model_validate(yaml.safe_load(given))), None
        if not rows:
            raise InputError(f"table {name!r}: {name}.json has nothing of {given.strip()}")
    named = [ratio for ratio in ratios if not ratio.endswith(BOUNDS)]
    cells = [(ratio, _cell(ratios[ratio]), _bounds(ratios, ratio)) for ratio in named]
    tables = [_table(("ratio", "value", "95 % interval"), cells)] if cells else []
    tables += [_rows_table(list(alike)) for _, alike in groupby(rows, key=list)]
    return "\n\n".join(
        [*([summary] if summary else []), *tables, f"`{name}.json`: {content.get('source') or _origin(content)}."]
    )


def _origin(content: Mapping[str, Any]) -> str:
    hardware, commit = content["hardware"], content["git"].get("commit")
    cores = f"{hardware['cores']} core{'' if hardware['cores'] == 1 else 's'} of {hardware['cpu']}"
    machine = " and ".join(gpu["name"] for gpu in hardware["gpus"]) or cores
    made = f"`{content['command']}` on {machine}, torch {content['versions']['torch']}"
    return made + (f", commit {commit[:12]}" if commit else "")


def _chosen(rows: Sequence[Mapping[str, Any]], part: Part) -> list[dict[str, Any]]:
    chosen = [dict(row) for row in rows if all(row.get(name, NOT_AVAILABLE) in values for name, values in part.rows.items())]
    if part.columns is None:
        return chosen
    kept = [name + end for name in part.columns for end in ("", *BOUNDS)]
    return [{name: row[name] for name in kept if name in row} for row in chosen]


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    bounds = {name + end for name in rows[0] for end in BOUNDS}
    columns = [name for name in rows[0] if name not in bounds]
    return _table(columns, [[f"{_cell(row[name])} {_bounds(row, name)}".strip() for name in columns] for row in rows])


def _bounds(values: Mapping[str, Any], name: str) -> str:
    low, high = (values.get(name + bound) for bound in BOUNDS)
    return "" if low is None or high is None else f"[{_cell(low)}, {_cell(high)}]"


def _cell(value: Any) -> str:
    if value is None:
        return NOT_AVAILABLE
    if isinstance(value, float):
        if value == 0 or abs(value) >= 0.1:
            return f"{value:.2f}"
        return f"{value:.3f}" if abs(value) >= 0.0005 else f"{value:.1e}"
    return str(value).replace("|", r"\|")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(run_command(TablesConfig, update_tables, description=__doc__))

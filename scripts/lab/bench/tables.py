"""Fill the tables of the documents from the benchmarks' files: `make tables`.

Whatever stands between `<!-- table: NAME -->` and `<!-- end -->` is replaced by the ratios and the rows of
docs/results/NAME.json, or by a sentence where there is no such file yet, so that no figure is ever copied by hand. The rest of
the document is left as it is. A part of a file is shown by a YAML mapping behind the name, such as
`<!-- table: heads {rows: {suite: [home]}, columns: [family, tau]} -->`:

    ratios   the ratios to show; without it, and with a mapping, none
    rows     the rows to show, by the values that they may have in some columns
    columns  of these; without it, all
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.runtime.files import CHECKOUT, read_json, read_text, write_text
from scripts.lab.settings import ResultsPart, ResultsTableConfig

# Where commands and recipes have moved since files were written: a document names where they are now.
MOVED = {
    " scripts/benchmark.py ": " scripts/lab/benchmark.py ",
    " configs/bench/": " scripts/lab/configs/bench/",
}
OPENING = re.compile(r"<!-- table: ([\w-]+)( \{[^\n]*\})? -->")
TABLE = re.compile(OPENING.pattern + r"\n.*?(?=<!-- end -->)", re.DOTALL)
BOUNDS = ("_low", "_high")
NOT_AVAILABLE = "–"


def update_tables(config: ResultsTableConfig) -> None:
    for path in documents() if config.document is None else [Path(config.document)]:
        text = read_text(path, "document")
        if (filled := fill_tables(text, Path(config.results))) != text:
            write_text(path, filled)


def documents() -> list[Path]:
    return [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]


def fill_tables(document: str, results: Path) -> str:
    """Return a Markdown document with its tables made anew from the benchmarks' files in a folder."""
    whole = {match.start() for match in TABLE.finditer(document)}
    for opening in OPENING.finditer(document):
        if opening.start() not in whole:
            raise InputError(f"table {opening[1]!r} has no `<!-- end -->` before the next table")
    return TABLE.sub(
        lambda match: f"<!-- table: {match[1]}{match[2] or ''} -->\n\n{_tables(results, match[1], match[2])}\n\n", document
    )


def _tables(results: Path, name: str, given: str | None) -> str:
    path = results / f"{name}.json"
    if not path.is_file():
        return f"`{name}.json` is not measured yet."
    content = read_json(path, "benchmark results")
    try:
        rows, ratios, summary = content["rows"], content["ratios"], content.get("summary")
        if given is not None:
            part = _part(name, given)
            rows, ratios, summary = _chosen_rows(rows, part), {key: ratios[key] for key in ratios if _named(key, part)}, None
            if not rows and not ratios:
                raise InputError(f"table {name!r}: {path} has nothing of {given.strip()}")
        source = f"`{name}.json`: {content['source'] if 'source' in content else _origin(content)}."
        return "\n\n".join(each for each in (summary, _ratios(ratios), _rows(rows), source) if each)
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"benchmark results {path} are not in the form that benchmarks write: {error!r}") from error


def _origin(content: Mapping[str, Any]) -> str:
    commit = content.get("git", {}).get("commit")
    return (
        f"`{present_command(content['command'])}` on {_machine(content['hardware'])}, torch {content['versions']['torch']}"
        + (f", commit {commit[:12]}" if commit else "")
    )


def _part(name: str, given: str) -> ResultsPart:
    try:
        return ResultsPart.model_validate(yaml.safe_load(given))
    except (ValidationError, yaml.YAMLError) as error:
        raise InputError(f"table {name!r}: {given.strip()} is no mapping of ratios, rows and columns") from error


def _chosen_rows(rows: Sequence[Mapping[str, Any]], part: ResultsPart) -> list[dict[str, Any]]:
    if not part.rows and part.columns is None:
        return []
    chosen = [row for row in rows if all(row.get(column, NOT_AVAILABLE) in values for column, values in part.rows.items())]
    if part.columns is None:
        return [dict(row) for row in chosen]
    bounds = ("", *BOUNDS)
    return [
        {name + bound: row[name + bound] for name in part.columns for bound in bounds if name + bound in row} for row in chosen
    ]


def _named(key: str, part: ResultsPart) -> bool:
    return any(key.removesuffix(bound) in part.ratios for bound in ("", *BOUNDS))


def _ratios(ratios: Mapping[str, float | None]) -> str:
    named = [name for name in ratios if not name.endswith(BOUNDS)]
    if not named:
        return ""
    return _table(("ratio", "value", "95 % interval"), [(name, _cell(ratios[name]), _bounds(ratios, name)) for name in named])


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(_rows_table(list(alike)) for _, alike in groupby(rows, key=list))


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = [name for name in rows[0] if not _bounds_another(name, rows[0])]
    return _table(columns, [[f"{_cell(row[name])} {_bounds(row, name)}".strip() for name in columns] for row in rows])


def _bounds_another(name: str, row: Mapping[str, Any]) -> bool:
    return any(name.endswith(bound) and name.removesuffix(bound) in row for bound in BOUNDS)


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


def present_command(command: str) -> str:
    for before, now in MOVED.items():
        command = command.replace(before, now)
    return command


def _machine(hardware: Mapping[str, Any]) -> str:
    gpus = [gpu["name"] for gpu in hardware["gpus"]]
    cores = f"{hardware['cores']} core{'' if hardware['cores'] == 1 else 's'}"
    return " and ".join(gpus) or f"{cores} of {hardware['cpu']}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""Fill the tables of the README from the benchmarks' files: `make tables`.

Whatever stands between `<!-- table: NAME -->` and `<!-- end -->` is replaced by the ratios and the rows of
docs/results/NAME.json, so that no figure is ever copied by hand. The rest of the document is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import read_json, read_text, write_text
from configs.schema.commands.benchmarks import ResultsTableConfig

OPENING = re.compile(r"<!-- table: ([\w-]+) -->")
TABLE = re.compile(OPENING.pattern + r"\n.*?(?=<!-- end -->)", re.DOTALL)
BOUNDS = ("_low", "_high")
NOT_AVAILABLE = "–"


def update_tables(config: ResultsTableConfig) -> None:
    """Rewrite the tables of the document."""
    path = Path(config.document)
    write_text(path, fill_tables(read_text(path, "document"), Path(config.results)))


def fill_tables(document: str, results: Path) -> str:
    """Return a Markdown document with its tables made anew from the benchmarks' files in a folder.

    Raises:
        InputError: a table has no end, or its file is missing or no results file.
    """
    whole = {match.start() for match in TABLE.finditer(document)}
    for opening in OPENING.finditer(document):
        if opening.start() not in whole:
            raise InputError(f"table {opening[1]!r} has no `<!-- end -->` before the next table")
    return TABLE.sub(lambda match: f"<!-- table: {match[1]} -->\n\n{_tables(results / f'{match[1]}.json')}\n\n", document)


def _tables(path: Path) -> str:
    """Return the summary in a line, the ratios, the rows, and where they come from, of one results file."""
    content = read_json(path, "benchmark results")
    try:
        ratios, rows = _ratios(content["ratios"]), _rows(content["rows"])
        source = f"`{content['command']}` on {_machine(content['hardware'])}, torch {content['versions']['torch']}."
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"benchmark results {path} are not in the form that benchmarks write: {error!r}") from error
    return "\n\n".join(part for part in (content.get("summary"), ratios, rows, source) if part)


def _ratios(ratios: Mapping[str, float | None]) -> str:
    named = [name for name in ratios if not name.endswith(BOUNDS)]
    if not named:
        return ""
    return _table(("ratio", "value", "95 % interval"), [(name, _cell(ratios[name]), _bounds(ratios, name)) for name in named])


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table for each run of rows with the same keys; a number's bounds stand in brackets behind it."""
    return "\n\n".join(_rows_table(list(alike)) for _, alike in groupby(rows, key=list))


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = [name for name in rows[0] if not _bounds_another(name, rows[0])]
    return _table(columns, [[f"{_cell(row[name])} {_bounds(row, name)}".strip() for name in columns] for row in rows])


def _bounds_another(name: str, row: Mapping[str, Any]) -> bool:
    """Say whether a column is a bound of another, in whose cells it stands."""
    return any(name.endswith(bound) and name.removesuffix(bound) in row for bound in BOUNDS)


def _bounds(values: Mapping[str, Any], name: str) -> str:
    low, high = (values.get(name + bound) for bound in BOUNDS)
    return "" if low is None or high is None else f"[{_cell(low)}, {_cell(high)}]"


def _cell(value: Any) -> str:
    """Return a value as it stands in a table: two digits after the point, three where the number is small, two in all below."""
    if value is None:
        return NOT_AVAILABLE
    if isinstance(value, float):
        if value == 0 or abs(value) >= 0.1:
            return f"{value:.2f}"
        return f"{value:.3f}" if abs(value) >= 0.0005 else f"{value:.1e}"
    return str(value).replace("|", r"\|")


def _machine(hardware: Mapping[str, Any]) -> str:
    """Name the machine: its GPUs where it has some, else its processor."""
    gpus = [gpu["name"] for gpu in hardware["gpus"]]
    cores = f"{hardware['cores']} core{'' if hardware['cores'] == 1 else 's'}"
    return " and ".join(gpus) or f"{cores} of {hardware['cpu']}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""Reports for tests: one built from records, and copies of it in which something is different."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from eval.acceptance import Tally
from eval.evaluation import build_report
from eval.report.schema import Report, parse_report

REMOVED = object()  # as a changed value: the field is not there


def report_of(inputs: Mapping[str, Any]) -> Report:
    """Build a report of one suite from what `build_report` takes, `prompts`, `generations` and `timings` being its suite's."""
    others = dict(inputs)
    records = Tally(inputs["decode"]["num_speculative_tokens"])
    records.add(others.pop("generations"), others.pop("timings"))
    return build_report(suites=[(others.pop("prompts"), others.pop("records", records))], **others)


def changed(report: Report, changes: Mapping[str, Any]) -> Report:
    """Return a copy of a report with other values by dotted path; mappings merge into a section, functions take the value."""
    return parse_report(changed_values(report, changes), "a changed report")


def changed_values(report: Report, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a report that were changed, without checking them; see `changed`."""
    values = copy.deepcopy(report.to_dict())
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = values
        for key in parents:
            section = section[key]
        if value is REMOVED:
            del section[last]
        elif callable(value):
            section[last] = value(section[last])
        elif isinstance(value, Mapping) and isinstance(section.get(last), dict):
            section[last] = {**section[last], **value}
        else:
            section[last] = value
    return values


def numbers_of(value: Any, path: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield (dotted path, number) of every number and every null in JSON values; list items go by index."""
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    else:
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield path, value
        return
    for key, child in children:
        yield from numbers_of(child, f"{path}.{key}" if path else str(key))

"""`draft.yaml` on disk: written with the reason beside each choice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs.runtime.files import write_text
from configs.schema.commands.running import DRAFT_FILE, STAGES, RunConfig

SECTIONS = ("data", "cache", "train", "eval")
WIDTH = 44  # of a key with its value, before the reason


class Choice(NamedTuple):
    """A value that was chosen, and why."""

    key: str  # of `RunConfig`, or section.dotted.key of a stage's config
    value: Any
    reason: str

    @property
    def setting(self) -> str:
        """The key with its value, as YAML."""
        return f"{self.key}: {json.dumps(self.value, ensure_ascii=False)}"

    def __str__(self) -> str:
        return f"{self.setting:{WIDTH + 6}}  {self.reason}"


def apply(config: RunConfig, choices: Iterable[Choice]) -> RunConfig:
    """Return a request with choices in place; what was neither asked nor chosen stays unset (`model_fields_set`)."""
    values = config.model_dump(mode="json", exclude_unset=True)
    for key, value, _ in choices:
        section, _, rest = key.partition(".")
        if rest:
            values[section] = {**(values.get(section) or {}), rest: value}
        else:
            values[key] = value
    return RunConfig.model_validate(values)


def asked_first(asked: RunConfig, choices: Iterable[Choice]) -> list[Choice]:
    """Return choices with what was asked for in place of what was chosen."""
    values = asked.model_dump(mode="json", exclude_unset=True)
    found = []
    for each in choices:
        section, _, rest = each.key.partition(".")
        given, name = (values.get(section) or {}, rest) if rest else (values, section)
        is_asked = name in given and each.key != "prompts"  # which are those asked for, or as many as there is time for
        found.append(Choice(each.key, given[name], "as asked") if is_asked else each)
    return found


def write_draft_file(config: RunConfig, choices: Sequence[Choice] = ()) -> Path:
    """Write `draft.yaml` into the output folder: what differs from the defaults, with the reasons of what was chosen."""
    path = Path(config.output) / DRAFT_FILE
    reasons = {each.key: each.reason for each in choices}
    for key, _, reason in choices:
        section, _, rest = key.partition(".")
        if rest and section not in SECTIONS:  # which are on one line
            reasons[section] = "; ".join(filter(None, (reasons.get(section), f"{rest}: {reason}")))
    values = config.model_dump(mode="json", exclude_defaults=True, exclude={"output"})  # which is the folder of the file
    if config.cache is None and "cache" in config.model_fields_set:  # asked for: without this line one would be chosen
        values["cache"] = None
    lines = [
        f"# draftsmith run {path}    resumes; the run's folder is that of this file",
        f"# draftsmith STAGE {path}  runs one stage: {', '.join(STAGES[1:])}",
    ]
    for key, value in values.items():
        if key in SECTIONS and value is not None:
            lines.append(f"{key}:  # changes to the config of this stage, until it has begun" if value else f"{key}: {{}}")
            lines += [_line(f"  {name}", each, reasons.get(f"{key}.{name}")) for name, each in value.items()]
        else:
            lines.append(_line(key, value, reasons.get(key)))
    write_text(path, "\n".join([*lines, ""]))
    return path


def _line(key: str, value: Any, reason: str | None) -> str:
    """Return a line of YAML; JSON is YAML in which nothing is taken for what it is not."""
    line = Choice(key, value, "").setting
    return line if reason is None else f"{line:{WIDTH}}  # {reason}"

"""The prompts that a source gives: those of a file, a folder or a data set, and which of them are taken.

A last message by the assistant is the data set's own answer, used only with `answers.written_by=dataset`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import wheel_file
from configs.schema.data import PromptsConfig, SourceConfig
from distill.generation.prompts import DUPLICATE, UNCATEGORISED, Prompt, everything_said, fit_prompts
from distill.generation.row_formats import detect_format, read_row
from distill.generation.source_files import load_rows, read_source
from heads.frozen.loading import Target

OUTSIDE_LIMITS = "outside_min_and_max_tokens"

logger = logging.getLogger("draftsmith")


def list_source(settings: PromptsConfig) -> Iterable[Prompt] | None:
    """Return the prompts of a source, those of a data set after the first `num_prompts` read when asked for; None where the
    target is to write them.
    """
    if settings.source == "self_seeded":
        return None
    if settings.source == "dataset":
        rows = dataset_prompts(settings)
        return chain(list(islice(rows, settings.num_prompts)), rows)
    if settings.source == "package":
        path = wheel_file(str(settings.package), str(settings.sha256), str(settings.path), "prompts")
        settings = settings.model_copy(update={"path": str(path)})
    return read_prompts(settings)


def read_prompts(config: PromptsConfig) -> list[Prompt]:
    """Return the prompts of `config.path`, a file or a folder of files (`distill.generation.source_files`), in order."""
    prompts: list[Prompt] = []
    seen: dict[str, Prompt] = {}
    formats = Counter[str]()
    for where, row in read_source(Path(str(config.path)), "prompt file"):
        prompt, format = _read_row(row, config, where)
        first = seen.setdefault(prompt.prompt_id, prompt)
        if first != prompt:
            raise InputError(f"{where}: question_id {prompt.prompt_id!r} was used in {first.where} for another prompt")
        prompts.append(prompt)
        formats[format] += 1
    if _names_a_column(config) and not formats["column"]:
        raise InputError(
            f"prompts.field: no row of prompt file {config.path} has {config.field!r}; the last has {', '.join(row)}"
        )
    counts = ", ".join(f"{count:,} as {name}" for name, count in formats.most_common())
    logger.info("prompt file %s: read %s", config.path, counts)
    return prompts


def dataset_prompts(config: PromptsConfig) -> Iterator[Prompt]:
    """Yield the rows of a data set, whose prompts stand in the column `config.field`, if it has one."""
    path = str(config.path)
    rows = load_rows(path, config.subset, config.split, revision=config.revision, section="prompts")
    if config.template is None and config.format == "auto" and config.field in rows.column_names:
        config = config.model_copy(update={"format": "column"})
    elif _names_a_column(config):
        columns = ", ".join(rows.column_names)
        raise InputError(f"prompts.field: data set {path} has no column {config.field!r}; there are {columns}")
    if not len(rows):
        raise InputError(f"data set {path}, split {config.split!r}, is empty")
    for number, row in enumerate(rows):
        yield _read_row({**row, "question_id": f"row-{number}"}, config, f"data set {path}, row {number}")[0]


def _read_row(row: Mapping[str, Any], config: PromptsConfig, where: str) -> tuple[Prompt, str]:
    setting = "prompts.field"
    format: str = config.format
    if config.template is not None:
        try:
            row, format = {**row, config.field: config.template.format_map(row)}, "column"
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            problem, there = f"{type(error).__name__} {error}", ", ".join(row) or "no key"
            raise InputError(
                f"{where}: prompts.template {config.template!r} does not fit ({problem}); the row has {there}"
            ) from error
    elif format == "auto":  # a column that is named goes before what the other keys say
        named = _names_a_column(config) and config.field in row
        format = "column" if named else detect_format(row, where, setting)
    category = config.category or UNCATEGORISED
    columns = {"column": config.field, "answer_column": config.answer_field}
    return read_row(row, format, where, **columns, default_category=category, setting=setting), format


def _names_a_column(config: PromptsConfig) -> bool:
    """Return whether the config names a column that has the prompt, or its answer, and leaves the format open."""
    named = config.field != PromptsConfig().field or config.answer_field is not None
    return config.format == "auto" and config.template is None and named


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Which prompts of one of several sources are taken: those within its limits that no source had before."""

    target: Target
    source: SourceConfig
    taken: set[str]  # the prompts of all sources so far, by everything said; admitted ones are added

    def objection(self, prompt: Prompt) -> str | None:
        """Admit a prompt, or return why it is left out."""
        shortest, longest = self.source.min_tokens, self.source.max_tokens
        if shortest is not None or longest is not None:
            length = len(prompt.encoded(self.target))
            if length < (shortest or 0) or (longest is not None and length > longest):
                return OUTSIDE_LIMITS
        said = everything_said(prompt)
        if said in self.taken:
            return DUPLICATE
        self.taken.add(said)
        return None

    def first(
        self, given: Iterable[Prompt], settings: PromptsConfig, max_new_tokens: int
    ) -> tuple[list[Prompt], dict[str, int]]:
        """Return the first prompts that fit and are admitted, as many as the settings say, and how many did not."""
        prompts: list[Prompt] = []
        dropped = Counter[str]()
        for each in given:
            fitting, changed = fit_prompts(self.target, [each], settings.on_too_long, max_new_tokens)
            reasons = [reason for reason in map(self.objection, fitting) if reason is not None]
            dropped.update(changed)
            dropped.update(reasons)
            prompts += [] if reasons else fitting
            if len(prompts) == settings.num_prompts:
                break
        return prompts, dict(dropped)

    def named(self, prompt: Prompt) -> Prompt:
        """Return a prompt under the name of its source, which has ids of its own, with the limit of its answers."""
        name = self.source.name
        return replace(prompt, prompt_id=f"{name}/{prompt.prompt_id}", source=name, max_new_tokens=self.source.max_new_tokens)


def check_readable(target: Target, prompts: Sequence[Prompt], *, written_here: bool) -> None:
    """Refuse prompts with images or sounds where a server writes the answers; warn of tools that nothing reads."""
    with_media = next((prompt for prompt in prompts if prompt.media), None)
    if with_media is not None and not written_here:
        raise InputError(
            f"prompt {with_media.prompt_id} brings images or sounds, which only the local target reads: set "
            "answers.written_by to target"
        )
    num_with_tools = sum(bool(prompt.tools) for prompt in prompts)
    if num_with_tools and "tools" not in str(target.tokenizer.chat_template):
        logger.warning("%d prompts bring tools, which the chat template of the target does not read", num_with_tools)


def check_given(prompts: Sequence[Prompt]) -> None:
    """Raise `InputError` where a prompt, which is named, brings no answer."""
    without = [prompt.prompt_id for prompt in prompts if prompt.answer is None]
    if without:
        raise InputError(
            f"answers.written_by is 'dataset', and {len(without)} of {len(prompts)} prompts bring no answer, the first is "
            f"{without[0]}: expected chat messages that end with one by the assistant; correct or leave out those rows, or set "
            "answers.written_by=target"
        )

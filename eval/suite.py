"""Prompts to evaluate on, and what a report says about where they came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from configs.errors import InputError
from configs.evaluating import SuiteConfig
from configs.files import read_jsonl, sha256_of
from distill.prompts import Prompt, load_rows
from eval.suite_formats import detect_format, to_prompt

CHECKOUT = Path(__file__).resolve().parent.parent

Row = tuple[str, Mapping[str, Any]]  # what names it in a complaint, its keys and values


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The prompts chosen from a suite file, in the order in which they are decoded."""

    prompts: tuple[Prompt, ...]
    source: str  # the path as it was given
    format: str
    # Of the whole file, or of all prompts of a data set as JSON, also where only some of its prompts are taken
    sha256: str
    num_turns_left_out: int  # of the prompts chosen, behind `max_turns`

    @property
    def ids(self) -> list[str]:
        """The prompts' ids, in order."""
        return [prompt.prompt_id for prompt in self.prompts]

    @property
    def categories(self) -> list[str]:
        """The categories that occur, in the order of their first prompts."""
        return list(dict.fromkeys(prompt.category for prompt in self.prompts))


def load_suite(config: SuiteConfig) -> Suite:
    """Read a suite and choose `num_prompts` of it, evenly over the categories.

    A path that does not exist in the working directory is looked up in the checkout, where the suites live that come with it;
    a folder, or a name of the form owner/name that is neither, is a data set.

    Raises:
        InputError: the file or data set is missing or malformed, names two prompts alike, or holds fewer prompts than asked
            for.
    """
    path = Path(config.path)
    if not path.is_absolute() and not path.exists():
        path = CHECKOUT / path if (CHECKOUT / path).exists() else path
    is_data_set = path.is_dir() or (
        not path.exists() and path.suffix not in (".json", ".jsonl") and config.path.count("/") == 1
    )
    rows = _data_set_rows(str(path), config) if is_data_set else _file_rows(path)
    format: str = config.format
    if format == "auto":
        where, row = rows[0]
        format = "column" if config.column is not None else detect_format(row, where)
    prompts = [
        to_prompt(row, number, format=format, column=config.column, where=where) for number, (where, row) in enumerate(rows)
    ]
    _check_ids(prompts, rows, path)
    chosen = _choose(prompts, config.num_prompts, path)
    asked = [replace(prompt, turns=prompt.turns[: config.max_turns]) for prompt in chosen]
    return Suite(
        prompts=tuple(asked),
        source=config.path,
        format=format,
        sha256=_hash_prompts(prompts) if is_data_set else sha256_of(path),
        num_turns_left_out=sum(len(prompt.turns) for prompt in chosen) - sum(len(prompt.turns) for prompt in asked),
    )


def _file_rows(path: Path) -> list[Row]:
    return [(f"suite {path}, line {line}", values) for line, values in read_jsonl(path, "suite")]


def _data_set_rows(path: str, config: SuiteConfig) -> list[Row]:
    loaded = load_rows(path, config.subset, config.split, section="suite")
    if not len(loaded):
        raise InputError(f"suite: data set {path}, split {config.split!r}, is empty")
    return [(f"suite {path}, row {number}", row) for number, row in enumerate(loaded)]


def _check_ids(prompts: Sequence[Prompt], rows: Sequence[Row], path: Path) -> None:
    """Refuse prompts that could not be told apart in a report."""
    seen: dict[str, tuple[str, Prompt]] = {}
    for prompt, (where, _) in zip(prompts, rows, strict=True):
        first_where, first = seen.setdefault(prompt.prompt_id, (where, prompt))
        if first != prompt:
            raise InputError(f"{where}: the id {prompt.prompt_id!r} was used by another prompt ({first_where})")
    if len(seen) < len(prompts):
        raise InputError(f"suite {path} holds the same prompt twice")


def _choose(prompts: Sequence[Prompt], num_prompts: int | None, path: Path) -> Sequence[Prompt]:
    if num_prompts is None or num_prompts == len(prompts):
        return prompts
    if num_prompts > len(prompts):
        raise InputError(f"suite.num_prompts: {num_prompts} asked for, but {path} holds {len(prompts)}")
    return spread_over_categories(prompts, num_prompts)


def _hash_prompts(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256 of what a data set asks: its files may be packed anew without a change of their content."""
    content = json.dumps([asdict(prompt) for prompt in prompts], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def spread_over_categories(prompts: Sequence[Prompt], num_prompts: int) -> list[Prompt]:
    """Take prompts in rounds, one of each category a round, categories and prompts in the order they come in."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    rounds = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in rounds if prompt is not None][:num_prompts]

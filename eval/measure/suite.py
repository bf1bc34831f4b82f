"""The suite: prompts to evaluate on, read from a file, a folder or a `datasets` data set, in one of the formats of
`distill.generation.row_formats`. `load_suite` is the entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import find_shipped, sha256_of
from configs.schema.evaluation import SuiteConfig
from distill.dataset.conversations import text_hash
from distill.generation.prompts import TOO_LONG, TRUNCATED, UNCATEGORISED, Prompt, fit_prompts
from distill.generation.row_formats import detect_format, read_row
from distill.generation.source_files import SUFFIXES, load_rows, read_source
from heads.artifact import read_training_prompts
from heads.frozen.loading import Target

OPTIONAL = ("tools", "media")  # of a prompt
SuiteRow = tuple[str, Mapping[str, Any]]  # its name in error messages, its keys and values


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The prompts chosen from a suite file, in the order in which they are decoded."""

    name: str
    prompts: tuple[Prompt, ...]
    source: str  # the path as it was given
    format: str
    # Of the whole file, or of all prompts of a data set as JSON, also where only some of its prompts are taken
    sha256: str
    num_turns_left_out: int  # of the prompts chosen, behind `max_turns`
    num_skipped: int = 0  # prompts that fill the target's context, and are left out
    num_truncated: int = 0  # or lost the middle of their first turn
    left_out: tuple[Prompt, ...] = ()  # prompts of the file that `num_prompts` leaves out, spread over the categories

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

    A suite that came with draftsmith is found from any folder; a folder, or a name of the form owner/name that is neither, is a
    data set.

    Raises:
        InputError: the file or data set is missing or malformed, names two prompts alike, or holds fewer prompts than asked
            for.
    """
    path = find_shipped(config.path)
    is_data_set = path.is_dir() or (not path.exists() and path.suffix not in SUFFIXES and config.path.count("/") == 1)
    rows = _data_set_rows(str(path), config) if is_data_set else list(read_source(path, "suite"))
    format: str = config.format
    if format == "auto":
        where, row = rows[0]
        format = "column" if config.column is not None else detect_format(row, where, "suite.column")
    prompts = [
        to_prompt(row, number, format=format, column=config.column, where=where) for number, (where, row) in enumerate(rows)
    ]
    _check_ids(prompts, rows, path)
    chosen = _choose(prompts, config.num_prompts, path)
    cut = [replace(prompt, turns=prompt.turns[: config.max_turns]) for prompt in chosen]
    ids = {prompt.prompt_id for prompt in chosen}
    others = [prompt for prompt in prompts if prompt.prompt_id not in ids]
    return Suite(
        name=config.label,
        prompts=tuple(cut),
        source=config.path,
        format=format,
        sha256=_hash_prompts(prompts) if is_data_set else sha256_of(path),
        num_turns_left_out=sum(len(prompt.turns) for prompt in chosen) - sum(len(prompt.turns) for prompt in cut),
        left_out=tuple(spread_over_categories(others, len(others))),
    )


def load_suites(configs: Sequence[SuiteConfig]) -> list[Suite]:
    """Read several suites of different names; ids of prompts are `name/id` in all but the first, so that none are the same."""
    first, *others = map(load_suite, configs)
    return [first, *(replace(suite, prompts=tuple(_renamed(each, suite.name) for each in suite.prompts)) for suite in others)]


def trained_on(prompts: Sequence[Prompt], artifacts: Sequence[str]) -> list[str] | None:
    """Return the ids of the prompts of which an artifact was trained on a turn; None where an artifact does not say.

    Raises:
        InputError: an artifact cannot be read.
    """
    known = [read_training_prompts(artifact) for artifact in artifacts]
    if any(hashes is None for hashes in known):
        return None
    hashes = {int(each) for part in known if part is not None for each in part}
    return [prompt.prompt_id for prompt in prompts if not hashes.isdisjoint(map(text_hash, prompt.user_texts))]


def fit_suite(suite: Suite, target: Target, on_too_long: str, max_new_tokens: int) -> Suite:
    """Leave out or shorten the prompts that fill the target's context, as `distill.generation.prompts.fit_prompts` does.

    Raises:
        InputError: no prompt is left.
    """
    prompts, changed = fit_prompts(target, suite.prompts, on_too_long, max_new_tokens)
    if not prompts:
        raise InputError(
            f"suite {suite.source}: each of the {len(suite.prompts)} prompts fills the target's context of "
            f"{target.max_positions} tokens; set suite.on_too_long to truncate, or take shorter ones"
        )
    num_skipped, num_truncated = changed.get(TOO_LONG, 0), changed.get(TRUNCATED, 0)
    return replace(suite, prompts=tuple(prompts), num_skipped=num_skipped, num_truncated=num_truncated)


def spread_over_categories(prompts: Sequence[Prompt], num_prompts: int) -> list[Prompt]:
    """Take prompts in rounds, one of each category a round, categories and prompts in the order they come in."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    rounds = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in rounds if prompt is not None][:num_prompts]


def to_prompt(row: Mapping[str, Any], number: int, *, format: str, column: str | None, where: str) -> Prompt:
    """Return the prompt of a row.

    Args:
        row: its keys and values.
        number: its place among the rows, from 0; its id where the row has none (`row-7`), except for `turns` and `messages`
            without one, which are named by their content.
        format: one of `distill.generation.row_formats`.
        column: the key that holds the prompt; with format `column`.
        where: names the row in error messages.

    Raises:
        InputError: the row does not have this format.
    """
    category, default_id = format if format in ("humaneval", "gsm8k") else UNCATEGORISED, f"row-{number}"
    prompt = read_row(
        row, format, where, column=column, default_category=category, default_id=default_id, setting="suite.column"
    )
    return _with_reference(prompt, row.get("reference"))


def _data_set_rows(path: str, config: SuiteConfig) -> list[SuiteRow]:
    loaded = load_rows(path, config.subset, config.split, section="suite")
    if not len(loaded):
        raise InputError(f"suite: data set {path}, split {config.split!r}, is empty")
    return [(f"suite {path}, row {number}", row) for number, row in enumerate(loaded)]


def _check_ids(prompts: Sequence[Prompt], rows: Sequence[SuiteRow], path: Path) -> None:
    """Refuse prompts that have the same id, or are the same."""
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
    """Return the SHA-256 of a data set's prompts: its files may be packed anew with the same content."""
    rows = [
        {name: value for name, value in asdict(prompt).items() if name != "where" and (value or name not in OPTIONAL)}
        for prompt in prompts
    ]
    content = json.dumps(rows, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _renamed(prompt: Prompt, suite: str) -> Prompt:
    return replace(prompt, prompt_id=f"{suite}/{prompt.prompt_id}")


def _with_reference(prompt: Prompt, reference: Any) -> Prompt:
    """Keep the reference answer of a prompt with one turn; MT-bench gives a list of them, one a turn."""
    if isinstance(reference, list) and len(reference) == 1:
        (reference,) = reference
    known = isinstance(reference, str) and len(prompt.turns) == 1
    return replace(prompt, answer=reference) if known else prompt

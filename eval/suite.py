"""Prompts to evaluate on, and what a report says about where they came from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from configs.errors import InputError
from configs.schema import SuiteConfig
from distill.prompts import Prompt, read_prompts

CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The prompts chosen from a suite file, in the order in which they are decoded."""

    prompts: tuple[Prompt, ...]
    source: str  # the path as it was given
    sha256: str  # of the whole file, also where only some of its prompts are taken
    num_later_turns: int  # turns after the first, which are not asked: they would need the answers to those before

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

    A path that does not exist in the working directory is looked up in the checkout, where the suites live that come with it.

    Raises:
        InputError: the file is missing or malformed, names two prompts alike, or holds fewer prompts than asked for.
    """
    path = Path(config.path)
    if not path.is_absolute() and not path.exists():
        path = CHECKOUT / path if (CHECKOUT / path).exists() else path
    prompts = read_prompts(path, default_category="uncategorised", what="suite")
    if len({prompt.prompt_id for prompt in prompts}) < len(prompts):
        raise InputError(f"suite {path} holds the same prompt twice")
    num_prompts = config.num_prompts or len(prompts)
    if num_prompts > len(prompts):
        raise InputError(f"suite.num_prompts: {num_prompts} asked for, but {path} holds {len(prompts)}")
    chosen = prompts if num_prompts == len(prompts) else spread_over_categories(prompts, num_prompts)
    return Suite(
        prompts=tuple(chosen),
        source=config.path,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        num_later_turns=sum(len(prompt.turns) - 1 for prompt in chosen),
    )


def spread_over_categories(prompts: Sequence[Prompt], num_prompts: int) -> list[Prompt]:
    """Take prompts in rounds, one of each category a round, categories and prompts in the order they come in."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    rounds = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in rounds if prompt is not None][:num_prompts]

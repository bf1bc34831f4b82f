"""The suite: prompts to evaluate on, from a file, a folder or a `datasets` data set, and their turns as requests.

The formats of the rows are those of `distill.generation.row_forms`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import find_shipped, sha256_of
from configs.schema.base import Policy
from configs.schema.evaluation import SuiteConfig
from distill.dataset.conversations import Message, text_hash
from distill.generation.bad_rows import LeftOut
from distill.generation.prompts import Prompt, encode_prompt, fit_prompts
from distill.generation.rendering import message_of
from distill.generation.row_forms import COLUMN, detect_format, read_row
from distill.generation.sources import SUFFIXES, load_rows, read_source
from eval.decoder.records import FAILED, Generation, Request, StopReason
from heads.artifact import read_training_prompts
from heads.frozen.loading import Target

OPTIONAL = ("tools", "media", "turn_keys", "answer_keys", "num_tokens")  # of a prompt


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The prompts chosen from a suite file, in the order in which they are decoded."""

    name: str
    prompts: tuple[Prompt, ...]
    source: str  # the path as it was given
    format: str
    # Of the whole file, or of all prompts of a data set or with `suite.system` as JSON, also where only some are taken
    sha256: str
    warnings: tuple[str, ...] = ()  # what a reader must know of what was left out of prompts
    trained_on: tuple[str, ...] | None = None  # ids of the prompts that the draft was trained on; None: unknown

    @property
    def ids(self) -> list[str]:
        return [prompt.prompt_id for prompt in self.prompts]

    @property
    def asked(self) -> list[tuple[str, int]]:
        """Every (prompt id, turn), in order."""
        return [(prompt.prompt_id, turn) for prompt in self.prompts for turn in range(len(prompt.turns))]


def load_suite(config: SuiteConfig) -> Suite:
    """Read a suite and choose `num_prompts` of it, evenly over the categories.

    A suite that came with draftsmith is found from any folder; a folder, or a name of the form owner/name that is neither, is a
    data set.
    """
    path = find_shipped(config.path)
    is_data_set = path.is_dir() or (not path.exists() and path.suffix not in SUFFIXES and config.path.count("/") == 1)
    rows = _data_set_rows(str(path), config) if is_data_set else list(read_source(path, "suite"))
    where, row = rows[0]
    format = COLUMN if config.column is not None else detect_format(row, where, "suite.column")
    read = partial(read_row, column=config.column, setting="suite.column")
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for number, (where, row) in enumerate(rows):
        prompt = read(row, format, where, default_id=f"row-{number}").below(config.system)
        prompt = _with_reference(prompt, row.get("reference", row.get("answer")))
        if (first := seen.setdefault(prompt.prompt_id, where)) != where:
            raise InputError(f"{where}: the id {prompt.prompt_id!r} was used before ({first})")
        prompts.append(prompt)
    chosen = prompts
    if config.num_prompts is not None and config.num_prompts < len(prompts):
        chosen = spread_over_categories(prompts, config.num_prompts)
    return Suite(
        name=config.label,
        prompts=tuple(chosen),
        source=config.path,
        format=format,
        sha256=_hash_prompts(prompts) if is_data_set or config.system is not None else sha256_of(path),
    )


def load_suites(configs: Sequence[SuiteConfig]) -> list[Suite]:
    """Read several suites of different names; ids of prompts are `name/id` in all but the first, so that none are the same."""
    first, *others = map(load_suite, configs)
    renamed = (
        replace(suite, prompts=tuple(replace(each, prompt_id=f"{suite.name}/{each.prompt_id}") for each in suite.prompts))
        for suite in others
    )
    return [first, *renamed]


def trained_on(prompts: Sequence[Prompt], artifacts: Sequence[str]) -> tuple[str, ...] | None:
    """Return the ids of the prompts of which an artifact was trained on a turn; None where an artifact does not say."""
    known = [read_training_prompts(artifact) for artifact in artifacts]
    if any(hashes is None for hashes in known):
        return None
    hashes = {int(each) for part in known if part is not None for each in part}
    return tuple(prompt.prompt_id for prompt in prompts if not hashes.isdisjoint(map(text_hash, prompt.user_texts)))


def fit_suite(suite: Suite, target: Target, on_too_long: Policy) -> Suite:
    """Leave out the prompts that fill the target's context, as `distill.generation.prompts.fit_prompts` does."""
    prompts = fit_prompts(target, suite.prompts, LeftOut(on_too_long=on_too_long))
    fills = f"the target's context of {target.max_positions} tokens"
    if not prompts:
        raise InputError(f"suite {suite.source}: each of the {len(suite.prompts)} prompts fills {fills}; take shorter ones")
    if num_left_out := len(suite.prompts) - len(prompts):
        warning = f"{num_left_out} of the suite's prompts were left out, because they fill {fills}: suite.on_too_long is skip"
        suite = replace(suite, warnings=(*suite.warnings, warning))
    return replace(suite, prompts=tuple(prompts))


def spread_over_categories(prompts: Sequence[Prompt], num_prompts: int) -> list[Prompt]:
    """Take prompts in rounds, one of each category a round, categories and prompts in the order they come in."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    rounds = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in rounds if prompt is not None][:num_prompts]


def _data_set_rows(path: str, config: SuiteConfig) -> list[tuple[str, Mapping[str, Any]]]:
    loaded = load_rows(path, config.subset, config.split, section="suite")
    return [(f"suite {path}, row {number}", row) for number, row in enumerate(loaded)]


def _hash_prompts(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256 of a data set's prompts: its files may be packed anew with the same content."""
    rows = [
        {name: value for name, value in asdict(prompt).items() if name != "where" and (value or name not in OPTIONAL)}
        for prompt in prompts
    ]
    content = json.dumps(rows, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _with_reference(prompt: Prompt, reference: Any) -> Prompt:
    """Keep the reference answer of a prompt with one turn; MT-bench gives a list of them, one a turn."""
    if isinstance(reference, list) and len(reference) == 1:
        (reference,) = reference
    known = isinstance(reference, str) and len(prompt.turns) == 1
    return replace(prompt, answer=reference) if known else prompt


# --- turns --------------------------------------------------------------------------------------------------------


class Turns:
    """Suites' prompts as requests, one turn at a time. Later turns follow the plain answers in every mode.

    If each mode went on from its own answers, one difference in the first turn would make the second turns different prompts.
    """

    def __init__(self, target: Target, prompts: Sequence[Prompt], suite_of: Mapping[str, str] | None = None) -> None:
        self.target = target
        self._suite_of = suite_of or {}  # the name of each prompt's suite, by its id
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self._messages: dict[str, list[Message]] = {prompt.prompt_id: prompt.messages for prompt in prompts}
        self.first = [self._request(prompt, encode_prompt(target, prompt), 0) for prompt in prompts]

    def follow(self, answers: Iterable[Generation]) -> tuple[list[Request], list[Generation]]:
        """Take the plain answers to a turn of different prompts; return the next turn's requests, and the turns that are lost.

        An empty generation stands for each turn that is lost: all those left after a failed answer, or after one that leaves no
        room in the context.
        """
        requests: list[Request] = []
        lost: list[Generation] = []
        for answer in answers:
            prompt, turn = self._prompts[answer.prompt_id], answer.turn + 1
            if turn >= len(prompt.turns):
                del self._messages[answer.prompt_id]
                continue
            if answer.stop_reason in FAILED:
                lost += self._lose(answer, "after_a_failed_turn")
                continue
            messages = self._messages[answer.prompt_id]
            asked = {"role": "user", "content": prompt.turns[turn]}
            messages += [message_of(self.target.tokenizer, answer.tokens), asked]
            tokens = tuple(self.target.encode_chat(messages, tools=prompt.tools, media=prompt.media))
            if len(tokens) < self.target.max_positions:
                requests.append(self._request(prompt, tokens, turn))
            else:
                lost += self._lose(answer, "no_room_in_context")
        return requests, lost

    def _request(self, prompt: Prompt, tokens: tuple[int, ...], turn: int) -> Request:
        return Request(
            prompt_id=prompt.prompt_id,
            category=prompt.category,
            tokens=tokens,
            turn=turn,
            suite=self._suite_of.get(prompt.prompt_id, ""),
            media_prompt=self.target.media_prompt(self._messages[prompt.prompt_id], prompt.media, tools=prompt.tools),
        )

    def _lose(self, answer: Generation, reason: StopReason) -> list[Generation]:
        """Return records of the turns behind an answer, which are lost."""
        prompt = self._prompts[answer.prompt_id]
        numbers = range(answer.turn + 1, len(prompt.turns))
        return [self._request(prompt, (), number).answered(answer.mode, reason) for number in numbers]

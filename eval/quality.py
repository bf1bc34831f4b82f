"""What the answers are worth, with the draft and without: perplexity under the target, and exact match with references.

A lossy mode may be faster at a price, and these numbers are the price. Both modes answered the same prompts, so what is
compared is the change prompt by prompt, and every interval draws whole prompts (`eval.stats`). Failed requests have
no score. A missing reference is refused before anything is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from configs.runtime.errors import InputError
from configs.schema.evaluation import QualityConfig
from distill.generation.prompts import Prompt
from eval.acceptance import Tally
from eval.decoder.records import AUTOREGRESSIVE, FAILED, SPECULATIVE, Generation
from eval.stats import LEVEL, Floats, fields_of, statistic_interval
from eval.teacher_forcing import answer_logits, pair_answers
from heads.frozen.loading import Target

Pair = tuple[Generation, Generation]  # plain, speculative

NUMBER = re.compile(r"(?:(?<!\w)-)?\d[\d,]*(?:\.\d+)?")  # a sign that is no subtraction, commas between thousands
MAX_LENGTH = 100  # characters of a number; a model that repeats digits has not answered


def check_references(config: QualityConfig | None, prompts: Sequence[Prompt]) -> None:
    """Refuse exact match where a prompt has no number in its reference; only a conversation of one turn brings one."""
    for prompt in prompts if config is not None and config.exact_match else ():
        if len(prompt.turns) > 1 or prompt.answer is None or final_number(prompt.answer) is None:
            raise InputError(
                f"quality.exact_match: prompt {prompt.prompt_id!r} has no reference answer with a number, got {prompt.answer!r}"
            )


def judge_quality(
    target: Target, records: Tally, prompts: Sequence[Prompt], asked: QualityConfig | None
) -> dict[str, Any] | None:
    """Return the report's `quality` section; `None` where it is not asked for."""
    if asked is None:
        return None
    pairs = pair_answers(records.of(AUTOREGRESSIVE), records.of(SPECULATIVE))
    complete = [pair for pair in pairs if not FAILED.intersection(answer.stop_reason for answer in pair)]
    references = {prompt.prompt_id: prompt.answer for prompt in prompts}
    return {
        "num_answers": len(complete),
        "num_identical": sum(plain.tokens == speculative.tokens for plain, speculative in complete),
        "num_failed": len(pairs) - len(complete),
        "num_cut": sum(any(answer.stop_reason != "eos" for answer in pair) for pair in complete),
        "perplexity": compare_perplexity(target, complete) if asked.perplexity and complete else None,
        "exact_match": compare_exact_match(target, complete, references) if asked.exact_match and complete else None,
    }


def compare_perplexity(target: Target, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return exp(mean negative log-probability of a token), pooled over all tokens of all answers."""
    rows = []
    for plain, speculative in pairs:
        nats = nats_of(target, plain)
        other = nats if plain.tokens == speculative.tokens else nats_of(target, speculative)
        rows.append((nats, len(plain.tokens), other, len(speculative.tokens)))
    return intervals(
        _by_prompt(pairs, rows),
        are_ratios=True,
        autoregressive=lambda sums: np.exp(sums[0] / sums[1]),
        speculative=lambda sums: np.exp(sums[2] / sums[3]),
        ratio=lambda sums: np.exp(sums[2] / sums[3] - sums[0] / sums[1]),
    )


def compare_exact_match(target: Target, pairs: Sequence[Pair], references: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the share of answers whose last number is the reference's, in both modes; every answer weighs the same."""

    def score(answer: Generation) -> float:
        text = target.tokenizer.decode(list(answer.tokens), skip_special_tokens=True)
        return float(final_number(str(text)) == final_number(references[answer.prompt_id] or ""))

    scored = [[score(answer) for answer in pair] for pair in pairs]
    columns = _by_prompt(pairs, [(*scores, 1.0) for scores in scored])
    section = intervals(
        columns,
        autoregressive=lambda sums: sums[0] / sums[2],
        speculative=lambda sums: sums[1] / sums[2],
        difference=lambda sums: (sums[1] - sums[0]) / sums[2],
    )
    num_changed = sum(plain != speculative for plain, speculative in scored)
    if num_changed == 0:
        section["difference_ci"] = unseen_change(len(columns[0]))
    return {**section, "num_changed": num_changed}


def _by_prompt(pairs: Sequence[Pair], rows: Sequence[Sequence[float]]) -> list[Floats]:
    """Add up the numbers of each prompt's turns, a row a pair; return them as columns, each [prompts]."""
    sums: dict[str, Floats] = {}
    for (plain, _), row in zip(pairs, rows, strict=True):
        sums[plain.prompt_id] = sums.get(plain.prompt_id, np.zeros(len(row))) + np.asarray(row, dtype=np.float64)
    return list(np.stack(list(sums.values()), axis=1))


def intervals(
    columns: Sequence[Floats], *, are_ratios: bool = False, **statistics: Callable[[Floats], Floats]
) -> dict[str, Any]:
    """Return each statistic of the columns' sums as a number and its `_ci`."""
    return fields_of({name: statistic_interval(each, *columns, is_ratio=are_ratios) for name, each in statistics.items()})


def nats_of(target: Target, answer: Generation) -> float:
    """Return the negative log-probability of an answer's tokens, its end included, at temperature 1 without top-k or top-p."""
    logits_TV = answer_logits(target, answer.prompt_tokens, answer.tokens, answer.media_prompt).float()
    tokens_T = torch.tensor(answer.tokens, device=logits_TV.device)
    return -float(logits_TV.log_softmax(-1).gather(1, tokens_T.unsqueeze(1)).cpu().double().sum())


def unseen_change(num_prompts: int, level: float = LEVEL) -> list[float]:
    """Return the interval of a mean difference of scores from 0 to 1 where none changed on so many prompts.

    The jackknife would say that nothing can ever change. Were a share x of prompts to change, none of n would with probability
    (1 - x)^n; the bound is where that is (1 - level) / 2 (Clopper and Pearson, 1934).
    """
    bound = 1 - ((1 - level) / 2) ** (1 / num_prompts)
    return [-bound, bound]


def final_number(text: str) -> Decimal | None:
    """Return the last number of a text, as GSM8K is commonly scored, by its value: 18 is 18.00; `None` where there is none."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found and len(found[-1]) <= MAX_LENGTH else None

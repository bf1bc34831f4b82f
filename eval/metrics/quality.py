"""The quality of the answers, with the draft and without: perplexity under the target, and scorers, side by side.

A lossy mode may be faster at a price, and these numbers are the price. Both modes answered the same prompts, so what is
compared is the change prompt by prompt, and every interval draws whole prompts (`eval.stats.bootstrap`). Failed requests have
no score. The user's functions are imported, and scorers called on an empty answer to every prompt, before anything is decoded,
so that a wrong name, a wrong signature or a missing reference costs seconds and not the run.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.runtime.errors import InputError, first_line
from configs.schema.evaluation import EvalConfig
from distill.generation.prompts import Prompt
from eval.decoder.records import AUTOREGRESSIVE, ENDED, FAILED, SPECULATIVE, Generation
from eval.metrics.likelihood import mean_log_likelihood, pair_answers
from eval.metrics.tally import Tally
from eval.stats.bootstrap import LEVEL, Floats, statistic_interval
from heads.frozen.loading import Target

Pair = tuple[Generation, Generation]  # plain, speculative
Function = Callable[..., Any]
EXACT_TEMPERATURE = 1.0

# A sign that is no subtraction; no digits inside a name (x2); thousands by commas; decimals; a whole denominator.
NUMBER = r"((?:(?<![\w)])-)?(?<![A-Za-z_\d])(?<!\d\.)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+|/[1-9]\d*)?)"
MARKS = (
    rf"####[^\d\n]{{0,20}}?{NUMBER}",
    rf"boxed\{{[^\d\n}}]{{0,20}}?{NUMBER}",
    rf"\b[Aa][Nn][Ss][Ww][Ee][Rr]\b[^\d\n]{{0,60}}?(?:\bis\b|:|=)[^\d\n]{{0,40}}?{NUMBER}",
    NUMBER,
)
MAX_LENGTH = 100  # characters of a number; a model that repeats digits has not answered
# What stands in and around a number without changing it, in Markdown, LaTeX and prices.
REWRITES = (
    (r"[−–](?=[$€£]?\d)", "-"),
    (r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2"),
    (r"\{,\}", ","),
    (r"\\[,!;]|(?<!\d)\*\*|\*\*(?!\d)|[$€£\\]", ""),
)


class Quality:
    """What one evaluation asks of its answers: scores, and pictures or sound for the report."""

    def __init__(self, config: EvalConfig, prompts: Sequence[Prompt]) -> None:
        self.config, self.asked = config, config.quality
        self.prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self.render = None if config.render is None else import_function(config.render, "render")
        self.features: Callable[[Sequence[str]], Tensor] | None = None
        self.scorers: dict[str, Function] = {}
        if self.asked is None:
            return
        if self.asked.features is not None:
            function = import_function(self.asked.features, "quality.features")
            self.features = partial(featurised, self.asked.features, function)
        if self.asked.exact_match is not None:
            self.scorers[self.asked.exact_match] = exact_match
        self.scorers |= {path: import_function(path, "quality.scorers") for path in self.asked.scorers}
        for prompt in prompts:
            for name in self.scorers:
                self.score(name, prompt, 0, "")

    def judge(self, target: Target, records: Tally) -> dict[str, Any] | None:
        """Return the report's `quality` section; `None` where it is not asked for."""
        if self.asked is None:
            return None
        pairs = pair_answers(records.of(AUTOREGRESSIVE), records.of(SPECULATIVE))
        complete = _complete(pairs)
        texts = [[_text(target, answer) for answer in pair] for pair in complete]
        return {
            "num_answers": len(complete),
            "num_identical": sum(plain.tokens == speculative.tokens for plain, speculative in complete),
            "num_failed": len(pairs) - len(complete),
            "num_cut": sum(any(answer.stop_reason not in ENDED for answer in pair) for pair in complete),
            "perplexity": self._perplexity(target, complete) if self.asked.perplexity and complete else None,
            "scores": {name: self._scores(complete, texts, name) for name in self.scorers} if complete else {},
            "feature_distance": self._distances(complete, texts) if len(complete) > 1 else None,
        }

    def score(self, name: str, prompt: Prompt, turn: int, answer: str) -> float:
        """Call a scorer; where it fails or returns no finite number, the error names it, the prompt and the answer."""
        asked = f"scorer {name} on the answer {answer[:40]!r} to the prompt {prompt.turns[turn][:40]!r}"
        value = _call(asked, self.scorers[name], prompt.turns[turn], answer, _reference(prompt, turn))
        if not isinstance(value, Real) or not math.isfinite(value):
            raise InputError(f"{asked} returned {value!r}; a scorer returns a finite number")
        return float(value)

    def rendered(self, target: Target, records: Tally) -> list[dict[str, str]]:
        """Return the first prompts' answers of both modes as data URLs of pictures or sound, where a function makes them."""
        if self.render is None:
            return []
        pairs = _complete(pair_answers(records.of(AUTOREGRESSIVE), records.of(SPECULATIVE)))
        first_turns = [pair for pair in pairs if not pair[0].turn][: self.config.num_rendered]
        rendered = []
        for pair in first_turns:
            prompt = self.prompts[pair[0].prompt_id]
            rendered.append({"prompt_id": prompt.prompt_id, "prompt": prompt.turns[0]})
            for mode, answer in zip((AUTOREGRESSIVE, SPECULATIVE), pair, strict=True):
                rendered[-1][mode] = url = _call(f"render: {self.config.render}", self.render, _text(target, answer))
                if not isinstance(url, str) or not url.startswith("data:"):
                    raise InputError(
                        f"render: {self.config.render} must return a data URL of a picture or of sound, got {str(url)[:40]!r}"
                    )
        return rendered

    def _perplexity(self, target: Target, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Return exp(mean negative log-probability of a token), pooled over all tokens of all answers."""
        rows = []
        for plain, speculative in pairs:
            nats = nats_of(target, plain)
            other = nats if plain.tokens == speculative.tokens else nats_of(target, speculative)
            rows.append((nats, len(plain.tokens), other, len(speculative.tokens)))
        return self._side_by_side(
            sums_by_prompt(pairs, rows),
            autoregressive=lambda sums: np.exp(sums[0] / sums[1]),
            speculative=lambda sums: np.exp(sums[2] / sums[3]),
            ratio=lambda sums: np.exp(sums[2] / sums[3] - sums[0] / sums[1]),
        )

    def _scores(self, pairs: Sequence[Pair], texts: Sequence[Sequence[str]], name: str) -> dict[str, Any]:
        """Return the mean score of an answer in both modes; every answer weighs the same."""
        scored = []
        for (plain, _), both in zip(pairs, texts, strict=True):
            scored.append([self.score(name, self.prompts[plain.prompt_id], plain.turn, text) for text in both])
        columns = sums_by_prompt(pairs, [(*scores, 1.0) for scores in scored])
        num_changed = sum(plain != speculative for plain, speculative in scored)
        section = self._side_by_side(
            columns,
            autoregressive=lambda sums: sums[0] / sums[2],
            speculative=lambda sums: sums[1] / sums[2],
            difference=lambda sums: (sums[1] - sums[0]) / sums[2],
        )
        if num_changed == 0:
            section["difference_ci"] = unseen_change(len(columns[0]), [score for scores in scored for score in scores])
        return {**section, "num_changed": num_changed}

    def _distances(self, pairs: Sequence[Pair], texts: Sequence[Sequence[str]]) -> dict[str, Any] | None:
        if self.features is None:
            return None
        plain_NF, speculative_NF = map(self.features, zip(*texts, strict=True))
        references = [_reference(self.prompts[plain.prompt_id], plain.turn) for plain, _ in pairs]
        known = [reference for reference in references if reference is not None]
        own = self.features(known) if len(known) == len(pairs) else None
        return {
            "autoregressive": None if own is None else frechet_distance(own, plain_NF),
            "speculative": None if own is None else frechet_distance(own, speculative_NF),
            "between": frechet_distance(plain_NF, speculative_NF),
        }

    def _side_by_side(self, columns: Sequence[Floats], **statistics: Callable[[Floats], Floats]) -> dict[str, Any]:
        """Return each statistic of the columns' sums as a number and its `_ci`."""
        section: dict[str, Any] = {}
        samples, seed = self.config.bootstrap_samples, self.config.decode.seed
        for name, statistic in statistics.items():
            found = statistic_interval(statistic, *columns, samples=samples, seed=seed)
            section |= {name: found.point, f"{name}_ci": found.bounds}
        return section


def import_function(path: str, key: str) -> Function:
    """Return the user's function of this import path; `key` names the config key that holds it."""
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs the user's file, which may fail in any way
        raise InputError(
            f"{key}: {path} cannot be imported: {type(error).__name__}: {first_line(error)}; it must be a function "
            "in an installed module, or in one found from the checkout's root or PYTHONPATH"
        ) from error
    if not callable(function):
        raise InputError(f"{key}: {path} is a {type(function).__name__}, not a function")
    return function


def _call(what: str, function: Function, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # the user's function, which may fail in any way
        raise InputError(f"{what} failed: {type(error).__name__}: {first_line(error)}") from error


def _complete(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if not FAILED.intersection(answer.stop_reason for answer in pair)]


def _text(target: Target, answer: Generation) -> str:
    return str(target.tokenizer.decode(list(answer.tokens), skip_special_tokens=True))


def _reference(prompt: Prompt, turn: int) -> str | None:
    """Return the suite's own answer to a turn. Only a conversation of one turn brings one (`eval.measure.suite`)."""
    return prompt.answer if turn == 0 else None


def nats_of(target: Target, answer: Generation) -> float:
    """Return the negative log-probability of an answer's tokens, its end included, at temperature 1 without top-k or top-p."""
    return -mean_log_likelihood(target, answer, EXACT_TEMPERATURE) * len(answer.tokens)


def sums_by_prompt(pairs: Sequence[Pair], rows: Sequence[Sequence[float]]) -> list[Floats]:
    """Add up the numbers of each prompt's turns, a row a pair; return them as columns, each [prompts]."""
    sums: dict[str, Floats] = {}
    for (plain, _), row in zip(pairs, rows, strict=True):
        sums[plain.prompt_id] = sums.get(plain.prompt_id, np.zeros(len(row))) + np.asarray(row, dtype=np.float64)
    return list(np.stack(list(sums.values()), axis=1))


def unseen_change(num_prompts: int, scores: Sequence[float], level: float = LEVEL) -> list[float] | None:
    """Return the interval of a mean difference where no score changed on so many prompts; `None` for unbounded scores.

    The bootstrap would say that nothing can ever change. Were a share x of prompts to change, none of n would with probability
    (1 - x)^n; the bound is where that is (1 - level) / 2 (Clopper and Pearson, 1934), for scores from 0 to 1.
    """
    if min(scores) < 0 or max(scores) > 1:
        return None
    bound = 1 - ((1 - level) / 2) ** (1 / num_prompts)
    return [-bound, bound]


def frechet_distance(one_NF: Tensor, other_NF: Tensor) -> float:
    """Return the Fréchet distance (Heusel et al., 1706.08500) of two sets of features, which falls with the sets' sizes."""
    apart_F = one_NF.mean(0) - other_NF.mean(0)
    one_FF, other_FF = (torch.atleast_2d(features_NF.T.cov()) for features_NF in (one_NF, other_NF))
    root_trace = torch.linalg.eigvals(one_FF @ other_FF).sqrt().real.sum()
    return max(0.0, float(apart_F @ apart_F + one_FF.trace() + other_FF.trace() - 2 * root_trace))


def featurised(name: str, function: Function, answers: Sequence[str]) -> Tensor:
    """Return the features of answers `[N, F]` by the user's function, finite numbers and as many for each."""
    what = f"quality.features: {name}"
    rows = [_call(what, lambda text: list(function(text)), answer) for answer in answers]
    features_NF: Tensor = _call(what, partial(torch.tensor, dtype=torch.float64), rows)
    if features_NF.ndim != 2 or not torch.isfinite(features_NF).all():
        raise InputError(f"{what} must return a list of finite numbers, as many for each answer")
    return features_NF


# --- exact match --------------------------------------------------------------------------------------------------


def exact_match(prompt: str, answer: str, reference: str | None) -> float:
    """Return 1 where answer and reference end in the same number, else 0: GSM8K's exact match."""
    del prompt
    wanted = None if reference is None else final_number(reference)
    if wanted is None:
        raise ValueError(f"there is no number in the reference {reference!r}")
    return float(final_number(answer) == wanted)


def final_number(text: str) -> Fraction | None:
    """Return the result that a text states, or `None` where it holds no number.

    The clearest mark counts: `#### 42`, then `\\boxed{42}`, then `the answer is 42`, then the last number of the text; of
    several marks of one kind the last. Numbers are compared by value: 18, 18.00, $18 and 36/2 are equal; units and percent
    signs are ignored. Mixed numbers (1 3/4), powers of ten (1e3), numbers in words and expressions are not understood.
    """
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    for mark in MARKS:
        if found := re.findall(mark, text):
            if len(found[-1]) > MAX_LENGTH:
                return None
            whole, _, denominator = found[-1].replace(",", "").partition("/")
            return Fraction(whole) / int(denominator or 1)
    return None

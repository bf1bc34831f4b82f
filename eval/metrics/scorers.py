"""Functions that score an answer: the exact match of numbers that comes with draftsmith, and the user's own, by import path.

A scorer takes (prompt, answer, reference) as texts, the reference being `None` where the suite has none, and returns a finite
number, larger for better. Each is called on an empty answer to every prompt before anything is decoded, so that a wrong
name, a wrong signature or a missing reference costs seconds and not the run. Torch-free.
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

from configs.runtime.errors import InputError, first_line
from configs.schema.evaluation import QualityConfig
from distill.generation.prompts import Prompt

Scorer = Callable[[str, str, str | None], float]

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


def load_scorers(config: QualityConfig, prompts: Sequence[Prompt]) -> dict[str, Scorer]:
    """Return the scorers asked for by name, each of which has scored an empty answer to every prompt.

    Raises:
        InputError: one cannot be imported, fails, or returns no number.
    """
    functions: dict[str, Callable[..., Any]] = {path: import_function(path, "quality.scorers") for path in config.scorers}
    if config.exact_match is not None:
        functions = {config.exact_match: exact_match, **functions}
    scorers: dict[str, Scorer] = {name: partial(_score, name, function) for name, function in functions.items()}
    for prompt in prompts:
        for scorer in scorers.values():
            scorer(prompt.turns[0], "", reference_of(prompt, 0))
    return scorers


def reference_of(prompt: Prompt, turn: int) -> str | None:
    """Return the suite's own answer to a turn. Only a conversation of one turn brings one (`eval.measure.suite`)."""
    return prompt.answer if turn == 0 else None


def import_function(path: str, key: str) -> Callable[..., Any]:
    """Return the user's function of this import path; `key` names the config key that holds it.

    Raises:
        InputError: it cannot be imported, or is no function.
    """
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


def _score(name: str, function: Callable[..., Any], prompt: str, answer: str, reference: str | None) -> float:
    """Call a scorer; where it fails or returns no finite number, the error names it, the prompt and the answer."""
    asked = f"scorer {name}, on the answer {_shortened(answer)!r} to the prompt {_shortened(prompt)!r}"
    try:
        value = function(prompt, answer, reference)
    except Exception as error:  # the user's function, which may fail in any way
        raise InputError(f"{asked}, failed: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(value, Real) or not math.isfinite(value):
        raise InputError(f"{asked}, returned {value!r}; a scorer returns a finite number")
    return float(value)


def _shortened(text: str, length: int = 40) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


# --- exact match --------------------------------------------------------------------------------------------------


def exact_match(prompt: str, answer: str, reference: str | None) -> float:
    """Return 1 where answer and reference end in the same number, else 0; an answer without a number is wrong.

    GSM8K's exact match, on free text and on references that end in `#### 42`.

    Raises:
        ValueError: the reference holds no number.
    """
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

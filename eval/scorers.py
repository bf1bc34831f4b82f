"""What scores an answer: the exact match that comes with draftsmith, and functions of the user's own, named in the config.

A scorer takes (prompt, answer, reference) as texts, the reference being `None` where the suite brings none, and returns a
number, larger for better. Each is asked about an empty answer to every prompt before anything is decoded, so that a wrong
name, a wrong signature or a missing reference costs seconds and not the run. Torch-free.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

from configs.errors import InputError, first_line
from configs.quality import QualityConfig
from distill.prompts import Prompt
from eval.exact_match import exact_match

Scorer = Callable[[str, str, str | None], float]


def load_scorers(config: QualityConfig, prompts: Sequence[Prompt]) -> dict[str, Scorer]:
    """Return the scorers asked for by name, each of which has scored an empty answer to every prompt.

    Raises:
        InputError: one cannot be imported, fails, or returns no number.
    """
    functions: dict[str, Callable[..., Any]] = {path: _import(path) for path in config.scorers}
    if config.exact_match is not None:
        functions = {config.exact_match: exact_match, **functions}
    scorers: dict[str, Scorer] = {name: partial(_score, name, function) for name, function in functions.items()}
    for prompt in prompts:
        for scorer in scorers.values():
            scorer(prompt.turns[0], "", reference_of(prompt, 0))
    return scorers


def reference_of(prompt: Prompt, turn: int) -> str | None:
    """Return the suite's own answer to a turn. Only a conversation of one turn brings one (`eval.suite_formats`)."""
    return prompt.answer if turn == 0 else None


def _import(path: str) -> Callable[..., Any]:
    """Import `package.module.function`.

    Raises:
        InputError: it cannot be imported, or is nothing to call.
    """
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs the user's file, which may fail in any way
        raise InputError(
            f"quality.scorers: {path} cannot be imported: {type(error).__name__}: {first_line(error)}; it must be a function "
            "in an installed module, or in one found from the checkout's root or PYTHONPATH"
        ) from error
    if not callable(function):
        raise InputError(f"quality.scorers: {path} is a {type(function).__name__}, not a function")
    return function


def _score(name: str, function: Callable[..., Any], prompt: str, answer: str, reference: str | None) -> float:
    """Ask a scorer, and say which one and about what where it gives no finite number."""
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

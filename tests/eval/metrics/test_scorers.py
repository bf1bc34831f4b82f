"""Scorers of the user's own: found by name, and refused in a sentence where they are of no use."""

import re

import pytest

from configs.runtime.errors import InputError
from configs.schema.evaluation import QualityConfig
from distill.generation.prompts import Prompt
from eval.metrics.scorers import load_scorers

MODULE = """
import numpy as np
NUMBER = 3
def length(prompt, answer, reference): return len(answer)
def is_right(prompt, answer, reference): return answer == reference
def numpy_number(prompt, answer, reference): return np.float32(0.5)
def nothing(prompt, answer, reference): return None
def text(prompt, answer, reference): return "0.5"
def endless(prompt, answer, reference): return float("nan")
def two_arguments(prompt, answer): return 0
def failing(prompt, answer, reference): return 1 / 0
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that can be imported, which holds `MODULE`."""
    (tmp_path / "my_scorers.py").write_text(MODULE)
    (tmp_path / "my_broken_scorers.py").write_text("def broken(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_scorers"


@pytest.fixture
def prompts():
    return [
        Prompt(prompt_id="q0", category="maths", turns=("How many?",), answer="#### 4"),
        Prompt(prompt_id="q1", category="maths", turns=("How many more?",), answer="#### 5"),
    ]


def test_scorers_are_called_with_prompt_answer_and_reference(module, prompts):
    names = [f"{module}.{name}" for name in ("length", "is_right", "numpy_number")]
    scorers = load_scorers(QualityConfig(scorers=names, exact_match="gsm8k"), prompts)

    assert list(scorers) == ["gsm8k", *names]
    assert scorers["gsm8k"]("How many?", "There are 4.", "#### 4") == 1.0
    assert [scorers[name]("How many?", "Four", "Four") for name in names] == [4.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nosuch_module.score", "cannot be imported: ModuleNotFoundError: No module named 'nosuch_module'; it must be"),
        ("my_scorers.nosuch", "my_scorers.nosuch cannot be imported: AttributeError"),
        ("my_broken_scorers.broken", "cannot be imported: SyntaxError"),
        ("my_scorers.NUMBER", "my_scorers.NUMBER is a int, not a function"),
        ("my_scorers.nothing", "on the answer '' to the prompt 'How many?', returned None; a scorer returns a finite number"),
        ("my_scorers.text", "returned '0.5'"),
        ("my_scorers.endless", "returned nan"),
        ("my_scorers.two_arguments", "failed: TypeError: two_arguments() takes 2 positional arguments but 3 were given"),
        ("my_scorers.failing", "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_scorer_is_refused_before_anything_is_decoded(module, prompts, name, complaint):
    with pytest.raises(InputError, match=re.escape(complaint)):
        load_scorers(QualityConfig(scorers=[name]), prompts)


@pytest.mark.parametrize("reference", [None, "none"])
def test_exact_match_needs_a_reference_with_a_number_for_every_prompt(prompts, reference):
    without = Prompt(prompt_id="q2", category="maths", turns=("And how many less?",), answer=reference)

    with pytest.raises(InputError, match=r"scorer gsm8k, .* 'And how many less\?', failed: .* no number in"):
        load_scorers(QualityConfig(exact_match="gsm8k"), [*prompts, without])

"""The number a text comes to, in the many ways that models and data sets write it."""

from fractions import Fraction

import pytest

from eval.metrics.quality import exact_match, final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # references
        ("She sold 48/2 = <<48/2=24>>24 clips in May.\n48+24 = <<48+24=72>>72\n#### 72", 72),
        ("#### 1,250", 1250),
        # marked answers, with numbers behind the mark's own
        ("The answer is 18. She had 16 eggs.", 18),
        ("The final answer is: $18 per day, for 7 days.", 18),
        ("**Answer:** 18\n\nChecked in 2 steps.", 18),
        ("So the answer is \\boxed{42}. Equation 3 shows it.", 42),
        (r"\[ \boxed{1{,}024} \] in 10 doublings", 1024),
        (r"$\boxed{\frac{3}{4}}$", Fraction(3, 4)),
        ("The answer is 5.\n#### 6\nBut 7 was asked.", 6),
        # the last number
        ("12,3456", 3456),
        ("It fell to −4 °C", -4),
        ("10-3", 3),
        ("x2 is 5 and y3 unknown", 5),
        ("a half, -.5", Fraction("-0.5")),
        ("36/2", 18),
        ("1/0", 0),
        # none
        ("", None),
        ("#### none", None),
    ],
)
def test_the_number_that_a_text_comes_to(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("It is 18 dollars.", "16 - 3 - 4 = 9\n9 * 2 = 18\n#### 18", 1.0),
        ("It is 19.", "#### 18", 0.0),
        ("I do not know.", "#### 0", 0.0),
    ],
)
def test_an_answer_is_right_when_its_number_equals_the_reference_s(answer, reference, score):
    assert exact_match("How many?", answer, reference) == score


def test_an_answer_that_runs_on_in_digits_is_none_and_costs_no_time():
    assert final_number("answer " * 2000 + "- , . / " * 2000 + "9" * 5000 + ",123" * 2000) is None

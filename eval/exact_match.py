"""Is the number an answer comes to the right one? GSM8K's exact match, on free text and on references that end in `#### 42`.

A model says its result in many ways, and the one that marks it most clearly is believed: `#### 42`, then `\\boxed{42}`, then
`the answer is 42`, then the last number of the text. Of several marks of one kind the last counts. Numbers are compared by
value: 18, 18.00, $18 and 36/2 are equal. Units and percent signs are ignored. Left out: mixed numbers (1 3/4), powers of ten
(1e3), numbers in words, and expressions that would have to be worked out.
"""

from __future__ import annotations

import re
from fractions import Fraction

# A sign that is no subtraction; no digits inside a name (x2); thousands by commas; decimals; a whole denominator.
NUMBER = r"((?:(?<![\w)])-)?(?<![A-Za-z_\d])(?<!\d\.)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+|/[1-9]\d*)?)"
MARKS = (
    rf"####[^\d\n]{{0,20}}?{NUMBER}",
    rf"boxed\{{[^\d\n}}]{{0,20}}?{NUMBER}",
    rf"\b[Aa][Nn][Ss][Ww][Ee][Rr]\b[^\d\n]{{0,60}}?(?:\bis\b|:|=)[^\d\n]{{0,40}}?{NUMBER}",
    NUMBER,
)
LONGEST = 100  # characters of a number; a model that runs on in digits has not answered
# What stands in and around a number without changing it, in Markdown, LaTeX and prices.
PLAINER = (
    (r"[−–](?=[$€£]?\d)", "-"),
    (r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2"),
    (r"\{,\}", ","),
    (r"\\[,!;]|(?<!\d)\*\*|\*\*(?!\d)|[$€£\\]", ""),
)


def exact_match(prompt: str, answer: str, reference: str | None) -> float:
    """Return 1 where answer and reference come to the same number, else 0; an answer without a number is wrong.

    Raises:
        ValueError: the reference holds no number.
    """
    del prompt
    wanted = None if reference is None else final_number(reference)
    if wanted is None:
        raise ValueError(f"there is no number in the reference {reference!r}")
    return float(final_number(answer) == wanted)


def final_number(text: str) -> Fraction | None:
    """Return the number that a text comes to, or `None` where it holds none."""
    for pattern, plainer in PLAINER:
        text = re.sub(pattern, plainer, text)
    for mark in MARKS:
        if found := re.findall(mark, text):
            if len(found[-1]) > LONGEST:
                return None
            whole, _, denominator = found[-1].replace(",", "").partition("/")
            return Fraction(whole) / int(denominator or 1)
    return None

"""The YAML dialect: what a plain scalar means, and what is refused by line."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.runtime.errors import ConfigError
from configs.runtime.loading import MAX_DEPTH, parse_yaml

# Beyond these JSON writes two escapes a character, which YAML does not join.
BASIC_TEXT = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=20)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | BASIC_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(BASIC_TEXT, inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("-.5", -0.5),
        ("2.", 2.0),
        ("-.inf", -math.inf),
        ("+7", 7),
        ("010", 10),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
    ],
)
def test_numbers_switches_and_nulls_are_read_as_yaml_1_2_does(text, value):
    parsed = parse_yaml(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("text", ["no", "yes", "on", "off", "n", "1:30", "2026-01-01", "1_000", "e5", ".", "0x", "<<"])
def test_words_that_yaml_1_1_turns_into_something_else_stay_text(text):
    assert parse_yaml(f"key: {text}", "here") == {"key": text}


@given(JSON_VALUES)
def test_json_that_another_program_wrote_is_read_back_equal(value):
    assert parse_yaml(json.dumps(value), "here") == value


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: key 'a' is given twice"),
        ("a: &x 1\nb: *x", r"line 2: aliases \(\*x\) are not accepted"),
        ("a: !!python/object/apply:os.system [ls]", "line 1: tags .* are not accepted"),
        ("a: !!timestamp nonsense", "tags .* are not accepted"),
        ("? [1, 2]\n: 3", "a key must be a word"),
        ("a: 1\n--- \nb: 2", "line 2: but found another document"),
        ("a: [1", "line 1: "),
        ('"\\U00110000"', "here: not YAML"),
        ("a: " + "9" * 5000, "a number of 5000 digits is too long"),
        ("[" * (MAX_DEPTH + 1), f"nested deeper than {MAX_DEPTH} levels"),
        ("- " * 100_000 + "x", f"nested deeper than {MAX_DEPTH} levels"),
    ],
)
def test_what_the_dialect_leaves_out_is_refused_with_its_line(text, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_yaml(text, "here")
    assert str(caught.value).startswith("here")


@given(st.text(alphabet=st.sampled_from("[]{}:,-?!&*|>'\"%@#\\UuxA0 \n\t~.e<")) | st.text())
def test_any_text_is_a_value_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        parse_yaml(text, "here")

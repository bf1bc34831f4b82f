"""Files and overrides become a checked config, or one sentence that says what to change."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.runtime.errors import ConfigError
from configs.runtime.loading import load_config, parse_yaml
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig, GateConfig
from configs.schema.training import DistillConfig, HeadsConfig

# Beyond these JSON writes two escapes a character, which YAML does not join.
BASIC_TEXT = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=20)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | BASIC_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(BASIC_TEXT, inner, max_size=4),
    max_leaves=10,
)


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a config file and gives its path."""

    def write(content: str | bytes) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def test_an_empty_file_and_no_file_are_the_defaults(written):
    for empty in ("", "# only a remark\n", "---\n"):
        assert load_config(DistillConfig, written(empty)) == load_config(DistillConfig, None) == DistillConfig()


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(written):
    path = written("decode: {seed: 1, batch_size: 4, top_k: 5}")
    config = load_config(EvalConfig, path, ["decode.seed=2", "decode.seed=3", "suite.num_prompts=5", "decode.top_k="])
    assert (config.decode.seed, config.decode.batch_size, config.suite.num_prompts) == (3, 4, 5)
    assert config.decode.top_k is None
    config = load_config(EvalConfig, None, ["decode.seed=5", "decode={batch_size: 2}"])
    assert (config.decode.seed, config.decode.batch_size) == (5, 2)


def test_a_section_given_in_part_keeps_the_other_values_it_has_by_default(written):
    assert DistillConfig().held_out.decode.max_new_tokens != DecodeConfig().max_new_tokens
    in_file = load_config(DistillConfig, written("held_out: {decode: {seed: 1}}"))
    by_override = load_config(DistillConfig, None, ["held_out.decode.seed=1"])
    assert in_file == by_override
    assert in_file.held_out.decode.max_new_tokens == DistillConfig().held_out.decode.max_new_tokens


@pytest.mark.parametrize(
    ("schema", "override", "sentence"),
    [
        (
            EvalConfig,
            "decode.temprature=1",
            "--set decode.temprature: unknown key 'decode.temprature'; .* 'decode.temperature'",
        ),
        (GateConfig, "rules=[{metric: a, mim: 1}]", "unknown key 'rules.0.mim'; the nearest known key is 'rules.0.min'"),
        (GateConfig, "rules=[{min: 1}]", "--set rules: rules.0.metric: field required"),
        (GateConfig, "rules=[{metric: a}]", "--set rules: rules.0: give exactly one of min and max"),
        (
            DistillConfig,
            "optimizer.learning_rate=yes",
            "--set optimizer.learning_rate: input should be a valid number, got 'yes'",
        ),
        (DistillConfig, f"schedule.batch_size=hf_{'a' * 1000}", r"a valid integer, got '\*\*\*'$"),
        (DistillConfig, "loss.temperature=.nan", "a finite number, got nan"),
        (DecodeConfig, "seed=" + "x" * 1000, r"a valid integer, got 'x{56}\.\.\.$"),
        (DistillConfig, "target=", "--set target: input should be a section of keys, got null"),
        (DistillConfig, "target.name", "--set target.name: expected dotted.key=value"),
        (DistillConfig, "output=@x", "--set output, line 1: found character '@'"),
        (HeadsConfig, "head.knd=2", "--set head.knd: unknown key 'head.knd'; the nearest known key is 'head.kind'$"),
        # right for another kind of head, which this one is not
        (
            HeadsConfig,
            "head.prefix_attention=true",
            "unknown key 'head.prefix_attention'; another kind of this section has it$",
        ),
        (HeadsConfig, "zzz=1", "unknown key 'zzz'; --keys lists the known ones$"),
        (HeadsConfig, "head={kind: eagle4}", "--set head: .*'eagle4' .* expected tags: 'medusa'"),
    ],
)
def test_each_mistake_in_an_override_has_its_sentence(schema, override, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config(schema, None, [override])
    assert "\n" not in str(caught.value)


def test_an_override_that_leads_nowhere_says_where_it_stops(written):
    path = written("rules: [{metric: a, min: 1}]\nmin_prompts: 8")
    with pytest.raises(ConfigError, match=r"--set rules\.0\.min: rules is a list; give it as a whole: --set rules=\[\.\.\.\]"):
        load_config(GateConfig, path, ["rules.0.min=2"])
    with pytest.raises(ConfigError, match=r"--set min_prompts\.x: min_prompts is 8, which has no keys"):
        load_config(GateConfig, path, ["min_prompts.x=2"])


def test_a_mistake_in_the_file_names_the_file_even_beside_overrides(written):
    path = written("decode: {sed: 1}")
    with pytest.raises(ConfigError) as caught:
        load_config(EvalConfig, path, ["decode.batch_size=2"])
    assert str(caught.value) == f"{path}: unknown key 'decode.sed'; the nearest known key is 'decode.seed'"


def test_of_several_mistakes_the_first_is_told_and_the_others_are_counted(written):
    with pytest.raises(ConfigError, match=r"draft: expected an artifact folder or a list of them, got 3 \(and 2 more\)$"):
        load_config(EvalConfig, written("draft: 3\noutput: 4\nrepeats: x"))


def test_a_missing_file_a_folder_and_bytes_that_are_no_text_are_refused(tmp_path, written):
    with pytest.raises(ConfigError, match="config file not found"):
        load_config(EvalConfig, str(tmp_path / "missing.yaml"))
    with pytest.raises(ConfigError, match="expected `key: value` lines at the top"):
        load_config(EvalConfig, written("- 1"))
    with pytest.raises(ConfigError, match="cannot read config file"):
        load_config(EvalConfig, written(b"\xff\xfe\x00"))


def test_a_file_changes_the_one_that_it_extends(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/base.yaml").write_text("suites: [{name: a}, {name: b}]\ndecode: {seed: 1, top_k: 5}\n")
    (tmp_path / "middle.yaml").write_text("extends: shared/base.yaml\ndecode: {seed: 2}\n")
    (tmp_path / "child.yaml").write_text("extends: middle.yaml\nsuites: [{name: c}, {name: d}]\nrepeats: 7\n")
    config = load_config(EvalConfig, tmp_path / "child.yaml", ["decode.batch_size=3"])
    assert (config.decode.seed, config.decode.top_k, config.decode.batch_size, config.repeats) == (2, 5, 3, 7)
    assert [each.name for each in config.all_suites] == ["c", "d"]


@pytest.mark.parametrize(
    ("extended", "complaint"),
    [
        ("recipe.yaml", r"recipe\.yaml: extends: recipe\.yaml extends this file in turn"),
        ("other.yaml", r"other\.yaml: extends: recipe\.yaml extends this file in turn"),
        ("missing.yaml", r"recipe\.yaml: extends: .*missing\.yaml"),
        ("wrong.yaml", r"recipe\.yaml \(extends .*wrong\.yaml\): unknown key 'sede'"),
        ("[a.yaml]", r"extends: expected the path of a config file, got \['a\.yaml'\]"),
    ],
)
def test_what_cannot_be_extended_is_one_sentence(extended, complaint, written, tmp_path):
    (tmp_path / "other.yaml").write_text("extends: recipe.yaml\n")
    (tmp_path / "wrong.yaml").write_text("sede: 1\n")
    with pytest.raises(ConfigError, match=complaint):
        load_config(EvalConfig, written(f"extends: {extended}\n"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("-.5", -0.5),
        ("2.", 2.0),
        ("-.inf", -math.inf),
        ("+7", 7),
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


@pytest.mark.parametrize("text", ["no", "yes", "on", "off", "n", "1:30", "2026-01-01", "1_000", "010", "e5", ".", "0x", "<<"])
def test_words_that_yaml_1_1_turns_into_something_else_stay_text(text):
    assert parse_yaml(f"key: {text}", "here") == {"key": text}


@given(JSON_VALUES)
def test_json_that_another_program_wrote_is_read_back_equal(value):
    assert parse_yaml(json.dumps(value), "here") == value


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: a key must be a word, and given once"),
        ("a: !!python/object/apply:os.system [ls]", "line 1: could not determine a constructor for the tag"),
        ("? [1, 2]\n: 3", "a key must be a word"),
        ("{enable_thinking:false}", "line 1: write a blank after the colon of 'enable_thinking:false'"),
        ("a: 1\n--- \nb: 2", "line 2: but found another document"),
        ('"\\U00110000"', "here: not YAML"),
        ("a: " + "9" * 5000, "here: not YAML"),
        ("- " * 100_000 + "x", "here: not YAML"),
    ],
)
def test_yaml_that_is_not_accepted_is_refused(text, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_yaml(text, "here")
    assert str(caught.value).startswith("here")


@given(st.text(alphabet=st.sampled_from("[]{}:,-?!&*|>'\"%@#\\UuxA0 \n\t~.e<")) | st.text())
def test_any_text_is_a_value_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        parse_yaml(text, "here")

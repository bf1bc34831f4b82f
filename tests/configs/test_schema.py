"""The rules that hold between settings; `test_loading` has the ones of single values."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.schema import DataConfig, DistillConfig, EvalConfig, GateConfig, GateRule, PromptsConfig, StudentConfig


@pytest.mark.parametrize("schema", [DataConfig, DistillConfig, EvalConfig, GateConfig])
def test_the_defaults_obey_their_own_rules(schema):
    # Defaults are not validated by pydantic; this round trip does it.
    assert schema.model_validate(schema().model_dump(), strict=True) == schema()


def test_a_config_cannot_be_changed_after_it_was_checked():
    with pytest.raises(ValidationError, match="frozen"):
        GateConfig().min_prompts = 3


def test_layers_are_kept_by_default_only_where_the_student_is_made_of_the_target():
    assert StudentConfig().layers == [0, 1, 28, 29]
    assert StudentConfig(init="model", path="small").layers is None


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"layers": None}, "layers is needed for init 'target_layers'"),
        ({"init": "model", "path": "small", "layers": [0]}, "and only there"),
        ({"init": "config"}, "path is needed for init 'model' and 'config'"),
        ({"path": "small"}, "path is needed"),
        ({"layers": [1, 0]}, "layers must rise"),
        ({"layers": [0, 0]}, "name each block once"),
        ({"layers": []}, "at least one block"),
    ],
)
def test_a_student_is_described_by_what_its_init_needs_and_nothing_else(settings, rule):
    with pytest.raises(ValidationError, match=rule):
        StudentConfig(**settings)


@pytest.mark.parametrize("settings", [{"source": "file"}, {"source": "dataset"}, {"path": "prompts.jsonl"}])
def test_prompts_have_a_path_exactly_when_they_come_from_one(settings):
    with pytest.raises(ValidationError, match="path is needed for source 'file' and 'dataset', and only there"):
        PromptsConfig(**settings)


@pytest.mark.parametrize("settings", [{}, {"min": 1.0, "max": 2.0}])
def test_a_rule_has_one_threshold(settings):
    with pytest.raises(ValidationError, match="exactly one of min and max"):
        GateRule(metric="speed.decode_speedup", **settings)

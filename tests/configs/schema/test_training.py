"""The rules that hold between settings; `test_loading` has the ones of single values."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.schema.data import PromptsConfig
from configs.schema.evaluation import GateRule
from configs.schema.training import LossConfig, StudentConfig


def test_layers_are_kept_by_default_only_where_the_student_is_made_of_the_target():
    assert StudentConfig().layers == [0, 1, 2, 3]
    assert StudentConfig(init="model", path="small").layers is None


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"layers": None}, "layers is needed for init 'target_layers'"),
        ({"init": "model", "path": "small", "layers": [0]}, "and only there"),
        ({"init": "fresh"}, "overrides is needed for init 'fresh'"),
        ({"overrides": {"hidden_size": 8}}, "overrides is needed for init 'fresh', and only there"),
        ({"init": "fresh", "layers": None, "overrides": {"hidden_size": 8}, "lora": {}}, "init 'fresh' makes random ones"),
        ({"init": "model"}, "path is needed for init 'model'"),
        ({"layers": [0, 0]}, "name each block once"),
        ({"layers": []}, "at least one block"),
    ],
)
def test_a_student_is_described_by_what_its_init_needs_and_nothing_else(settings, rule):
    with pytest.raises(ValidationError, match=rule):
        StudentConfig(**settings)


def test_the_loss_is_the_forward_kl_unless_another_or_a_mix_is_asked_for():
    assert LossConfig().weights == {"forward_kl": 1.0}
    assert LossConfig(divergence="jsd").weights == {"jsd": 1.0}
    assert LossConfig(mix={"forward_kl": 0.5, "jsd": 0.0}).weights == {"forward_kl": 0.5}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"divergence": "forwad_kl"}, "'forward_kl'"),
        ({"mix": {"forwad_kl": 1.0}}, "unknown divergence 'forwad_kl'; the nearest known one is 'forward_kl'"),
        ({"mix": {"jsd": 0.0, "reverse_kl": 0.0}}, "at least one weight of mix must be above 0"),
        ({"mix": {"jsd": 1.0}, "divergence": "jsd"}, "give divergence or mix, and null for the other one"),
        ({"divergence": None}, "give divergence or mix"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(settings, rule):
    with pytest.raises(ValidationError, match=rule):
        LossConfig(**settings)


@pytest.mark.parametrize(
    "settings", [{"source": "file"}, {"source": "dataset"}, {"source": "package"}, {"path": "prompts.jsonl"}]
)
def test_prompts_have_a_path_exactly_when_they_come_from_one(settings):
    with pytest.raises(ValidationError, match="path is needed for source 'file', 'dataset' and 'package', and only there"):
        PromptsConfig(**settings)


@pytest.mark.parametrize("settings", [{}, {"min": 1.0, "max": 2.0}])
def test_a_rule_has_one_threshold(settings):
    with pytest.raises(ValidationError, match="exactly one of min and max"):
        GateRule(metric="speed.decode_speedup", **settings)

"""The rules that hold between settings; `test_loading` has the ones of single values."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.runtime.errors import ConfigError
from configs.runtime.loading import load_config
from configs.schema.data import DataConfig
from configs.schema.training import DistillConfig, LossConfig, StudentConfig


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


ON_POLICY = "policy.on_policy=0.5"
LABELS = "cross_entropy would take the draft's own tokens for labels"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("loss.divergence=cross_entropy", LABELS),
        ("loss={mix: {forward_kl: 1, cross_entropy: 0.1}, divergence: null}", LABELS),
        ("data.cache=runs/cache", r"data\.cache must be null: .*, or set policy\.on_policy to null"),
    ],
)
def test_what_the_draft_writes_is_neither_copied_nor_cached(setting, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(DistillConfig, None, [ON_POLICY, setting])
    load_config(DistillConfig, None, [setting])
    load_config(DistillConfig, None, [ON_POLICY, "loss={mix: {forward_kl: 1, cross_entropy: 0}, divergence: null}"])


def test_prompts_that_the_target_writes_itself_bring_no_answers():
    with pytest.raises(ConfigError, match=r"prompts\.source 'self_seeded' brings none"):
        load_config(DataConfig, None, ["answers.written_by=dataset"])
    load_config(DataConfig, None, ["answers.written_by=dataset", "prompts={source: file, path: prompts.jsonl}"])

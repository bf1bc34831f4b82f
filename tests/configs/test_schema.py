"""The rules that hold between settings; `test_loading` has the ones of single values."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.runtime.errors import ConfigError
from configs.runtime.loading import load_config
from configs.schema.commands.running import RunConfig
from configs.schema.data import DataConfig
from configs.schema.decoding import (
    ConfidenceStopping,
    DecodeConfig,
    DynamicTree,
    ParticleSampling,
    StaticTree,
    TypicalAcceptance,
)
from configs.schema.heads import HydraSettings
from configs.schema.training import DistillConfig, HeldOutDecodingConfig, LossConfig, StudentConfig

GROWN = DynamicTree(kind="dynamic")
TYPICAL = TypicalAcceptance(kind="typical")
SMC = ParticleSampling(kind="smc")


def static(candidates="without_replacement"):
    return StaticTree(kind="static", branching=[2], candidates=candidates)


@pytest.mark.parametrize(
    ("settings", "rule", "draws"),
    [
        ({}, "one_hot", False),
        ({"verification": "block"}, "block", True),
        ({"temperature": 0.0}, "greedy", False),
        ({"verification": "token"}, "token", True),
        ({"tree": static()}, "without_replacement", True),
        ({"tree": static("with_replacement")}, "with_replacement", True),
        ({"tree": static("k_seq")}, "k_seq", True),
        ({"tree": static(), "verification": "one_hot"}, "one_hot", False),
        ({"lossy": TYPICAL}, "typical", False),
        ({"lossy": TYPICAL, "tree": static()}, "typical", False),
        ({"temperature": 0.0, "tree": GROWN}, "greedy", False),
        ({"lossy": SMC}, "smc", True),
    ],
)
def test_settings_come_to_a_rule(settings, rule, draws):
    config = DecodeConfig(**{"temperature": 1.0} | settings)
    assert (config.rule, config.draws) == (rule, draws)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tree": static(), "verification": "block"}, "judges chains only"),
        ({"tree": GROWN, "verification": "one_hot"}, "tree"),
        ({"tree": static(), "repetition_penalty": 1.1}, "tree"),
        ({"lossy": SMC, "frequency_penalty": 0.1}, "lossy"),
        ({"lossy": TYPICAL, "temperature": 0.0}, "nothing to relax at temperature 0"),
        ({"lossy": SMC, "verification": "block"}, "takes the place of verification block"),
        ({"lossy": SMC, "tree": static()}, "set tree and stopping to null"),
        ({"lossy": SMC, "stopping": ConfidenceStopping(rule="confidence")}, "set tree and stopping to null"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        DecodeConfig(**{"temperature": 1.0} | settings)


def test_checkpoints_are_not_chosen_by_a_lossy_rule():
    with pytest.raises(ValidationError, match=r"decode\.lossy must be null"):
        HeldOutDecodingConfig(decode=DecodeConfig(temperature=1.0, lossy=TYPICAL))


def test_a_temperature_by_which_no_logit_can_be_divided_is_refused():
    with pytest.raises(ValidationError, match="temperature must be 0"):
        DecodeConfig(temperature=9e-5)
    assert DecodeConfig(temperature=1e-4).rule == "one_hot"


# --- training -----------------------------------------------------------------------------------------------------------


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
    assert LossConfig(divergence={"forward_kl": 0.5, "jsd": 0.0}).weights == {"forward_kl": 0.5}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"divergence": "forwad_kl"}, "'forward_kl'"),
        ({"divergence": {"forwad_kl": 1.0}}, "'forward_kl'"),
        ({"divergence": {"jsd": 0.0, "reverse_kl": 0.0}}, "at least one weight of divergence must be above 0"),
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
        ("loss.divergence={forward_kl: 1, cross_entropy: 0.1}", LABELS),
        ("data.cache=runs/cache", r"data\.cache must be null: .*, or set policy\.on_policy to null"),
    ],
)
def test_what_the_draft_writes_is_neither_copied_nor_cached(setting, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(DistillConfig, None, [ON_POLICY, setting])
    load_config(DistillConfig, None, [setting])
    load_config(DistillConfig, None, [ON_POLICY, "loss.divergence={forward_kl: 1, cross_entropy: 0}"])


@pytest.mark.parametrize(
    ("schema", "settings", "key"),
    [
        (RunConfig, {"num_processes": -3}, "num_processes"),
        (HydraSettings, {"kind": "hydra", "window": 64}, "window"),
        (HydraSettings, {"kind": "hydra", "layer": {"mlp_width": 8}}, "layer"),
    ],
)
def test_what_would_do_nothing_or_cannot_be_is_refused(schema, settings, key):
    with pytest.raises(ValidationError, match=key):
        schema(**settings)


def test_prompts_that_the_target_writes_itself_bring_no_answers():
    with pytest.raises(ConfigError, match=r"prompts\.source 'self_seeded' brings none"):
        load_config(DataConfig, None, ["answers.written_by=dataset"])
    load_config(DataConfig, None, ["answers.written_by=dataset", "prompts={source: file, path: prompts.jsonl}"])

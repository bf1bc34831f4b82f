"""Keys of earlier releases: read with one line, or refused where they ask for what is gone."""

from __future__ import annotations

import pytest

from configs.runtime.errors import ConfigError
from configs.runtime.loading import load_config
from configs.schema import retired
from configs.schema.evaluation import EvalConfig
from configs.schema.retired import Retired, was_off
from configs.schema.training import HeadsConfig

TABLE = {
    "TappedSettings.blur": Retired("taps are read as they are", off=(None, 0.0)),
    "HeadsConfig.diet": Retired("give optimizer.weight_decay", off=(None, {"share": 0.0, "steps": None})),
}


def test_a_key_whose_value_never_mattered_is_ignored(caplog):
    config = EvalConfig.model_validate({"lossless": {"check_float32_prompts": 2, "tie_noise": 3.0}})
    assert config.lossless.tie_noise == 3.0
    assert caplog.messages == ["check_float32_prompts is ignored: every answer is checked, by a wider copy of the target"]


@pytest.mark.parametrize("given", ["head.blur=0.0", "diet=null", "diet={share: 0.0}"])
def test_what_meant_off_is_ignored_with_one_line(given, monkeypatch, caplog):
    monkeypatch.setattr(retired, "RETIRED", TABLE)
    config = load_config(HeadsConfig, None, ["head.kind=eagle3", given])
    assert config == load_config(HeadsConfig, None)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("head.blur=0.5", "taps are read as they are"),
        ("diet={share: 0.5}", "give optimizer.weight_decay"),
    ],
)
def test_what_is_gone_is_refused_with_what_to_use_instead(given, sentence, monkeypatch):
    monkeypatch.setattr(retired, "RETIRED", TABLE)
    with pytest.raises(ConfigError, match=sentence):
        load_config(HeadsConfig, None, ["head.kind=eagle3", given])


def test_a_checkpoints_settings_tell_what_was_off(monkeypatch):
    monkeypatch.setattr(retired, "RETIRED", TABLE)
    assert was_off("head.blur", 0.0)
    assert was_off("diet.share", 0.0)
    assert not was_off("head.blur", 0.5)
    assert not was_off("diet.share", 0.5)
    assert not was_off("head.blurred", 0.0)

"""The evaluation's config: what an earlier version's file says is still read."""

from __future__ import annotations

from configs.schema.evaluation import EvalConfig


def test_a_key_of_before_is_ignored_with_one_line(caplog):
    config = EvalConfig.model_validate({"lossless": {"check_float32_prompts": 2, "tie_noise": 3.0}})
    assert config.lossless.tie_noise == 3.0
    assert caplog.messages == [
        "lossless.check_float32_prompts is ignored: every answer is checked, by a wider copy of the target"
    ]

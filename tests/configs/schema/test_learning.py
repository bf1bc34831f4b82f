"""The data policy's settings: phases in order, shares within a batch, and what cannot go together with rewriting."""

import pytest
from pydantic import ValidationError

from configs.runtime.errors import ConfigError
from configs.runtime.loading import load_config
from configs.schema.data import DataConfig
from configs.schema.learning import DataPhase, PolicyConfig
from configs.schema.training import DistillConfig

ON_POLICY = "policy.phases=[{on_policy: 0.5}]"


def test_by_default_the_draft_writes_nothing():
    assert DistillConfig().policy.phases == [DataPhase()]
    assert not DistillConfig().policy.rewrites
    assert DataPhase(on_policy=0.7, draft_states=0.3).rewrites  # which fill the batch


def test_a_phase_holds_from_its_share_to_the_next_ones():
    policy = PolicyConfig(phases=[DataPhase(), DataPhase(from_share=0.3, on_policy=0.25), DataPhase(from_share=0.8)])
    held = [policy.phases.index(policy.phase_after(step / 10)) for step in range(10)]
    assert held == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2]
    assert policy.rewrites


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"phases": []}, "first phase must have from_share 0, got no phase"),
        ({"phases": [{"from_share": 0.5}]}, r"first phase must have from_share 0, got 0\.5"),
        ({"phases": [{}, {"from_share": 0.5}, {"from_share": 0.5}]}, r"must rise from phase to phase, got 0, 0\.5, 0\.5"),
        ({"phases": [{"on_policy": 0.6, "draft_states": 0.5}]}, r"may not exceed 1 together, got 0\.6 and 0\.5"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(settings, rule):
    with pytest.raises(ValidationError, match=rule):
        PolicyConfig.model_validate(settings)


@pytest.mark.parametrize(
    "loss", ["loss.divergence=cross_entropy", "loss={mix: {forward_kl: 1, cross_entropy: 0.1}, divergence: null}"]
)
def test_the_drafts_own_tokens_are_never_labels_to_copy(loss):
    with pytest.raises(ConfigError, match="cross_entropy would take its tokens for labels"):
        load_config(DistillConfig, None, [ON_POLICY, loss])
    load_config(DistillConfig, None, [loss])
    load_config(DistillConfig, None, [ON_POLICY, "loss={mix: {forward_kl: 1, cross_entropy: 0}, divergence: null}"])


def test_a_cache_does_not_know_what_the_draft_writes():
    with pytest.raises(ConfigError, match=r"which no cache holds: set data\.cache to null"):
        load_config(DistillConfig, None, [ON_POLICY, "data.cache=runs/cache"])
    load_config(DistillConfig, None, ["data.cache=runs/cache"])


def test_prompts_that_the_target_writes_itself_bring_no_answers():
    with pytest.raises(ConfigError, match=r"prompts\.source 'self_seeded' brings none"):
        load_config(DataConfig, None, ["answers.written_by=dataset"])
    load_config(DataConfig, None, ["answers.written_by=dataset", "prompts={source: file, path: prompts.jsonl}"])

"""On-policy rows: what cannot go together with them."""

import pytest

from configs.runtime.errors import ConfigError
from configs.runtime.loading import load_config
from configs.schema.data import DataConfig
from configs.schema.training import DistillConfig

ON_POLICY = "policy.on_policy=0.5"


@pytest.mark.parametrize(
    "loss", ["loss.divergence=cross_entropy", "loss={mix: {forward_kl: 1, cross_entropy: 0.1}, divergence: null}"]
)
def test_the_drafts_own_tokens_are_never_labels_to_copy(loss):
    with pytest.raises(ConfigError, match="cross_entropy would take the draft's own tokens for labels"):
        load_config(DistillConfig, None, [ON_POLICY, loss])
    load_config(DistillConfig, None, [loss])
    load_config(DistillConfig, None, [ON_POLICY, "loss={mix: {forward_kl: 1, cross_entropy: 0}, divergence: null}"])


def test_a_cache_does_not_know_what_the_draft_writes():
    with pytest.raises(
        ConfigError, match=r"data\.cache must be null: no cache holds what the draft writes, or set policy\.on_policy to null"
    ):
        load_config(DistillConfig, None, [ON_POLICY, "data.cache=runs/cache"])
    load_config(DistillConfig, None, ["data.cache=runs/cache"])


def test_prompts_that_the_target_writes_itself_bring_no_answers():
    with pytest.raises(ConfigError, match=r"prompts\.source 'self_seeded' brings none"):
        load_config(DataConfig, None, ["answers.written_by=dataset"])
    load_config(DataConfig, None, ["answers.written_by=dataset", "prompts={source: file, path: prompts.jsonl}"])

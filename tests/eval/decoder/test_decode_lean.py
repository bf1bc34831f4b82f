"""Decoding by lean forwards gives what decoding by transformers' gives, from the loaded target to the check of its tokens."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import decode, generate
from eval.lossless import judge_lossless
from heads.artifact import load_draft, save_draft_lm
from heads.frozen.loading import load_target
from heads.inference.runner import runner_of
from tests.support.decoding import metadata_of_draft_lm, requests_for
from tests.support.family_checks import SMALL

PROMPTS = [[5, 9, 6], [7, 12, 3, 44, 9, 20], [40, 11, 12, 2]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def targets(request, tiny_run):
    """The same target twice: by transformers' forward and by a lean one."""
    settings = {"name": str(tiny_run / "target"), "dtype": request.param, "device": "cpu"}
    return load_target(TargetConfig(**settings)), load_target(TargetConfig(**settings, forward="lean"))


def draft_for(folder, target):
    return load_draft(folder / "artifact", target.identity, target.model)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_plain_and_speculative_answers_are_those_by_transformers(targets, tiny_run, batch_size):
    config = DecodeConfig(max_new_tokens=16, batch_size=batch_size)  # behind these bfloat16 meets a near tie
    plain, lean = targets
    expected = generate(plain, PROMPTS, config)
    assert generate(lean, PROMPTS, config) == expected
    assert generate(lean, PROMPTS, config, draft_for(tiny_run, lean).proposer) == expected


def test_a_wrong_lean_forward_cannot_pass_for_rounding(targets, monkeypatch):
    lean, config = targets[1], DecodeConfig(max_new_tokens=8)
    right, _ = decode(lean, requests_for(PROMPTS), config)
    assert judge_lossless(lean, right, {"speculative": right}, config, LosslessConfig(), None)["verdict"] == "lossless"
    forward = runner_of(lean.model).forward
    logits = forward.logits
    monkeypatch.setattr(forward, "logits", lambda hidden: logits(hidden).roll(1, -1))
    wrong, _ = decode(lean, requests_for(PROMPTS), config)
    assert judge_lossless(lean, wrong, {"speculative": wrong}, config, LosslessConfig(), None)["verdict"] == "not_lossless"


def test_a_draft_of_another_family_runs_by_transformers_and_the_report_says_so(targets, tiny_run, tmp_path):
    lean = targets[1]
    model = AutoModelForCausalLM.from_config(GPTNeoXConfig(**SMALL), dtype=torch.float32)
    save_draft_lm(tmp_path / "artifact", model, lean.tokenizer, metadata_of_draft_lm(lean.identity.to_dict()))
    draft = draft_for(tmp_path, lean)
    assert not runner_of(draft.proposer.model).forward
    assert len(draft.warnings) == 1
    assert "not GPTNeoXForCausalLM with sdpa; set target.forward to transformers" in draft.warnings[0]
    config = DecodeConfig(max_new_tokens=8)
    assert generate(lean, PROMPTS, config, draft.proposer) == generate(lean, PROMPTS, config)

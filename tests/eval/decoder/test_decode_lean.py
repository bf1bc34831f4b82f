"""A lean forward is checked by transformers' own, and a draft that has none runs by that."""

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
def lean(request, tiny_run):
    return load_target(TargetConfig(name=str(tiny_run / "target"), dtype=request.param, device="cpu", forward="lean"))


def test_a_wrong_lean_forward_cannot_pass_for_rounding(lean, monkeypatch):
    config = DecodeConfig(max_new_tokens=8)
    right, _ = decode(lean, requests_for(PROMPTS), config)
    assert judge_lossless(lean, right, {"speculative": right}, config, LosslessConfig(), None)["verdict"] == "lossless"
    forward = runner_of(lean.model).forward
    logits = forward.logits
    monkeypatch.setattr(forward, "logits", lambda hidden: logits(hidden).roll(1, -1))
    wrong, _ = decode(lean, requests_for(PROMPTS), config)
    assert judge_lossless(lean, wrong, {"speculative": wrong}, config, LosslessConfig(), None)["verdict"] == "not_lossless"


def test_a_draft_of_another_family_runs_by_transformers_and_the_report_says_so(lean, tmp_path):
    model = AutoModelForCausalLM.from_config(GPTNeoXConfig(**SMALL), dtype=torch.float32)
    save_draft_lm(tmp_path / "artifact", model, lean.tokenizer, metadata_of_draft_lm(lean.identity.to_dict()))
    draft = load_draft(tmp_path / "artifact", lean.identity, lean.model)
    assert not runner_of(draft.proposer.model).forward
    assert len(draft.warnings) == 1
    assert "not GPTNeoXForCausalLM with sdpa; set target.forward to transformers" in draft.warnings[0]
    config = DecodeConfig(max_new_tokens=8)
    assert generate(lean, PROMPTS, config, draft.proposer) == generate(lean, PROMPTS, config)

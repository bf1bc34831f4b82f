"""The loop itself: what a skipped step leaves as it was."""

import json

import pytest
import torch
from accelerate import Accelerator

from tests.support.caches import random_conversations
from tests.support.training_runs import distil, distill_config


@pytest.mark.parametrize("skipped", [False, True])
def test_a_step_that_fp16_skips_does_not_move_the_schedule(skipped, monkeypatch, as_target, tiny_llama, tmp_path):
    monkeypatch.setattr(Accelerator, "optimizer_step_was_skipped", property(lambda self: skipped))
    target = as_target(tiny_llama(seed=1, dtype=torch.float32, layers=3))
    config = distill_config(tmp_path, max_steps=4, log_every_steps=1, eval_every_steps=None)
    distil(config, target, random_conversations([(6, 8)] * 16, 64, seed=0))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert (len({line["learning_rate"] for line in lines}) == 1) == skipped

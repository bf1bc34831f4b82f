"""The loop itself: what a skipped step leaves as it was."""

from threading import Event

import pytest
import torch
from accelerate import Accelerator

from configs.runtime.errors import InputError
from tests.support.caches import random_conversations
from tests.support.training_runs import distil, distill_config, read_metrics
from train.loop.checkpoints import Checkpoints
from train.loop.milestones import Milestones
from train.loop.records import METRICS_FILE


@pytest.mark.parametrize("skipped", [False, True])
def test_a_step_that_fp16_skips_does_not_move_the_schedule(skipped, monkeypatch, as_target, tiny_llama, tmp_path):
    monkeypatch.setattr(Accelerator, "optimizer_step_was_skipped", property(lambda self: skipped))
    target = as_target(tiny_llama(seed=1, dtype=torch.float32, layers=3))
    config = distill_config(tmp_path, max_steps=4, log_every_steps=1, eval_every_steps=None)
    distil(config, target, random_conversations([(6, 8)] * 16, 64, seed=0))
    lines = read_metrics(tmp_path / METRICS_FILE)
    assert len(lines) == 4
    assert (len({line["learning_rate"] for line in lines}) == 1) == skipped


def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_the_next_is_due(monkeypatch, as_target, tiny_llama, tmp_path):
    failed, steps = Event(), []

    def fail(*_):
        failed.set()
        raise InputError("the disk is full")

    plain = Milestones.after_step

    def after_step(milestones, **stopping):
        steps.append(milestones.progress.step)
        if milestones.progress.step == 3:
            assert failed.wait(30)
            milestones.training.checkpoints._background._under_way.exception()
        plain(milestones, **stopping)

    monkeypatch.setattr(Checkpoints, "_complete", fail)
    monkeypatch.setattr(Milestones, "after_step", after_step)
    target = as_target(tiny_llama(seed=1, dtype=torch.float32, layers=3))
    config = distill_config(tmp_path, max_steps=8, checkpoint_every_steps=2, eval_every_steps=None)
    with pytest.raises(InputError, match="the disk is full"):
        distil(config, target, random_conversations([(6, 8)] * 16, 64, seed=0))
    assert steps == [1, 2, 3]

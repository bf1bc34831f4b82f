"""A step in bfloat16, and in float16 with a loss scale, has nearly float32's loss and gradient."""

import pytest
import torch
from torch.nn import functional

from distill.dataset.batches import Example, collate
from tests.support.tiny_heads import HEADS
from tests.support.training_runs import distill_config, draft_task

SCALE = 2.0**10  # that of a loss in float16, whose small gradients would be 0 without it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [*HEADS, "draft_lm"])
def test_the_gradient_is_that_of_float32(kind, dtype, head_task, greedy_target, greedy_rows, tmp_path):
    torch.manual_seed(0)
    settings = {"schedule": {"mixed_precision": "no"}}
    if kind == "draft_lm":
        task = draft_task(distill_config(tmp_path, settings=settings), greedy_target, greedy_rows)
    else:
        task = head_task(kind, output=str(tmp_path), **settings)
    batch = collate([Example(row.prompt_ids + row.answer_ids, len(row.prompt_ids)) for row in greedy_rows])

    def step(scale):
        torch.manual_seed(0)  # some families draw what they train
        task.module.train().zero_grad()
        loss = task.loss(task.module, batch, task.source.read(batch)).loss / 10
        (loss * scale).backward()
        gradients = [each.grad.flatten() for each in task.module.parameters() if each.grad is not None]
        return loss.item(), torch.cat(gradients) / scale

    expected, exact = step(1.0)
    with torch.autocast("cpu", dtype):
        found, gradient = step(SCALE if dtype == torch.float16 else 1.0)
    assert found == pytest.approx(expected, rel=2e-2)
    assert found != expected
    assert functional.cosine_similarity(gradient, exact, dim=0) > 0.99
    assert gradient.norm().item() == pytest.approx(exact.norm().item(), rel=5e-2)

"""A step whose activations are computed anew, or in bfloat16: less is kept, and loss and gradient are the same."""

import pytest
import torch
from torch.nn import functional

from configs.runtime.errors import ConfigError
from distill.dataset.batches import Example, collate
from heads.modules.layers import checkpoint_activations
from tests.support.tiny_heads import HEADS
from tests.support.training_runs import distill_config, draft_task, kept_bytes, train_task

CHECKPOINTED = {"schedule": {"batch_size": 4, "max_steps": 4, "mixed_precision": "no", "activation_checkpointing": True}}
PLAIN = {"schedule": CHECKPOINTED["schedule"] | {"activation_checkpointing": None}}


@pytest.fixture
def make_task(head_task, greedy_target, greedy_rows, tmp_path):
    def make(kind, settings, folder):
        torch.manual_seed(0)
        if kind == "draft_lm":
            return draft_task(distill_config(tmp_path / folder, settings=settings), greedy_target, greedy_rows)
        return head_task(kind, output=str(tmp_path / folder), **settings)

    return make


def forward(task, rows):
    batch = collate([Example(row.prompt_ids + row.answer_ids, len(row.prompt_ids)) for row in rows])
    return task.loss(task.module.train(), batch, task.source.read(batch))


def seeded(run, *arguments):
    torch.manual_seed(0)  # some families draw what they train
    return run(*arguments)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash", "draft_lm"])
def test_the_losses_are_the_same_and_less_is_kept(kind, make_task, greedy_rows):
    plain, checkpointed = (make_task(kind, settings, name) for settings, name in ((PLAIN, "plain"), (CHECKPOINTED, "again")))
    kept, all_kept = (kept_bytes(lambda task=task: seeded(forward, task, greedy_rows)) for task in (checkpointed, plain))
    assert kept < 0.9 * all_kept
    (weights, losses), (other_weights, other_losses) = (seeded(train_task, each, greedy_rows) for each in (plain, checkpointed))
    assert other_losses == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(other_weights, weights, atol=1e-5, rtol=1e-4)


def test_a_draft_lm_that_cannot_is_refused(greedy_target, monkeypatch):
    monkeypatch.setattr(type(greedy_target.model), "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match=r"schedule\.activation_checkpointing: LlamaForCausalLM has none; set it to null"):
        checkpoint_activations(greedy_target.model)


@pytest.mark.parametrize("kind", [*HEADS, "draft_lm"])
def test_the_gradient_in_bfloat16_is_that_of_float32(kind, make_task, greedy_rows):
    task = make_task(kind, PLAIN, "run")

    def step():
        task.module.train().zero_grad()
        loss = seeded(forward, task, greedy_rows).loss / 10
        loss.backward()
        return loss.item(), torch.cat([each.grad.flatten() for each in task.module.parameters() if each.grad is not None])

    expected, exact = step()
    with torch.autocast("cpu", torch.bfloat16):
        found, gradient = step()
    assert found == pytest.approx(expected, rel=2e-2)
    assert found != expected
    assert functional.cosine_similarity(gradient, exact, dim=0) > 0.99
    assert gradient.norm().item() == pytest.approx(exact.norm().item(), rel=5e-2)

"""Training on rows that the draft writes: it resumes bit for bit, and drawing changes nothing else."""

import dataclasses

import pytest
import torch

from distill.dataset.batches import ConversationDataset, collate
from tests.support.training_runs import distil, distill_config, draft_task

LORA = {"lora": {"rank": 4, "dropout": 0.1}, "draft_vocab_size": 20}
POLICY = {"on_policy": 0.6}


@pytest.fixture
def target(greedy_target):
    return dataclasses.replace(greedy_target, eos_token_ids=(9,))


@pytest.fixture
def config_for(tmp_path):
    """A function that gives the config of a distillation under a data policy, into a folder of that name."""

    def make(name="run", policy=None, student=None, **schedule):
        steps = {"log_every_steps": 1, "eval_every_steps": None, "max_steps": 5, "checkpoint_every_steps": 3} | schedule
        return distill_config(tmp_path / name, student, settings={"policy": policy or {}}, **steps)

    return make


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("student", "schedule"),
    [(LORA, {}), ({}, {"batch_size": 2, "gradient_accumulation_steps": 2})],
    ids=["lora, reduced vocabulary", "accumulated"],
)
def test_a_resumed_run_rewrites_as_the_undisturbed_one(config_for, target, greedy_rows, student, schedule):
    per_step = schedule.get("gradient_accumulation_steps", 1)
    whole = distil(config_for("whole", POLICY, student, **schedule), target, greedy_rows)
    with pytest.raises(KeyboardInterrupt):
        distil(config_for("parts", POLICY, student, **schedule), target, greedy_rows, stop_after=4 * per_step)
    assert equal(distil(config_for("parts", POLICY, student, **schedule), target, greedy_rows), whole)
    assert not equal(distil(config_for("none", None, student, **schedule), target, greedy_rows), whole)


def window_of(rows, count=4):
    return [collate(list(ConversationDataset(rows, 64))[:count])]


def test_drawing_leaves_the_draft_in_training_and_all_randomness_where_it_was(config_for, target, greedy_rows):
    config = config_for("run", POLICY, {"lora": {"rank": 4, "dropout": 0.5}, "draft_vocab_size": 20})
    task = draft_task(config, target, greedy_rows)
    for layer in task.module.draft.model.layers:
        layer.self_attn.attention_dropout = 0.5
    task.module.train()
    before = {name: tensor.clone() for name, tensor in task.module.state_dict().items()}
    states = torch.get_rng_state()
    prepared = [task.prepare(task.module, window_of(greedy_rows), 0) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), states)
    (((first,), sums), ((second,), _)) = prepared
    assert int(sums["rewritten_share"]) > 0
    assert torch.equal(first.input_ids_BT, second.input_ids_BT)  # dropout would give other draws the second time
    assert all(module.training for module in task.module.draft.modules())
    assert all(parameter.grad is None for parameter in task.module.parameters())
    assert any(parameter.requires_grad for parameter in task.module.parameters())
    assert equal(before, task.module.state_dict())

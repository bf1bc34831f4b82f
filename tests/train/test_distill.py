"""The training run: it learns, it resumes bit for bit, and it keeps the draft that decodes best."""

import dataclasses
import json

import pytest
import torch

from configs.runtime.errors import InputError
from distill.dataset.batches import ConversationDataset, collate
from tests.support.training_runs import distil, distill_config, draft_task
from train.launch import make_accelerator
from train.loop.checkpoints import list_checkpoints
from train.tasks.draft import DraftTask


def kept_checkpoints(folder):
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


@pytest.mark.parametrize(("every", "stop_after"), [(3, 10), (4, 12)], ids=["at an epoch's end", "within the second epoch"])
def test_a_resume_finds_its_place_among_accumulated_batches(tmp_path, greedy_target, greedy_rows, every, stop_after):
    # An epoch is 8 micro-batches: steps of 3, 3 and 2 of them.
    def config(name):
        schedule = {"batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 7, "checkpoint_every_steps": every}
        return distill_config(tmp_path / name, eval_every_steps=None, **schedule)

    whole = distil(config("whole"), greedy_target, greedy_rows)
    with pytest.raises(KeyboardInterrupt):
        distil(config("parts"), greedy_target, greedy_rows, stop_after=stop_after)
    assert kept_checkpoints(tmp_path / "parts") == [f"step-0000000{every}"]
    resumed = distil(config("parts"), greedy_target, greedy_rows)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_a_run_that_does_not_resume_leaves_no_checkpoint_of_the_one_before(tmp_path, greedy_target, greedy_rows):
    distil(distill_config(tmp_path), greedy_target, greedy_rows)
    anew = {"max_steps": 6, "checkpoint_every_steps": 2, "keep_checkpoints": 1}
    with pytest.raises(KeyboardInterrupt):
        distil(distill_config(tmp_path, resume=False, **anew), greedy_target, greedy_rows, stop_after=5)
    assert kept_checkpoints(tmp_path) == ["step-00000004"]
    distil(distill_config(tmp_path, **anew), greedy_target, greedy_rows)
    assert kept_checkpoints(tmp_path) == ["step-00000006"]


def test_a_held_out_prompt_that_cannot_be_decoded_is_refused_before_training(tmp_path, greedy_target, greedy_rows):
    config = distill_config(tmp_path)
    long = dataclasses.replace(greedy_rows[0], prompt_ids=(5,) * 300)
    with pytest.raises(InputError, match="p0/0 has 300 tokens; the target's context is 256"):
        DraftTask(config, greedy_target, greedy_rows, [long], make_accelerator(config.schedule, tmp_path))


def test_the_artifact_is_the_best_draft_not_the_last(tmp_path, greedy_target, greedy_rows, monkeypatch):
    scores = iter([1.5, 2.5, 2.0])
    monkeypatch.setattr(DraftTask, "evaluate", lambda *_: {"tokens_per_target_step": next(scores)})
    distil(distill_config(tmp_path, max_steps=15), greedy_target, greedy_rows)
    provenance = json.loads((tmp_path / "artifact" / "draftsmith.json").read_text())["provenance"]
    assert (provenance["step"], provenance["held_out"]["tokens_per_target_step"]) == (10, 2.5)


def test_a_micro_batch_without_labels_reaches_every_parameter_with_a_gradient_of_0(tmp_path, greedy_target, greedy_rows):
    # One of several processes may get such a batch, and the others wait for its gradients.
    task = draft_task(distill_config(tmp_path, {"draft_vocab_size": 20}), greedy_target, greedy_rows)
    batch = collate(list(ConversationDataset(greedy_rows, 64))[:2])
    batch = batch._replace(loss_mask_BT=torch.zeros_like(batch.loss_mask_BT))
    task.loss(task.module, batch, task.source.read(batch)).loss.backward()
    gradients = [parameter.grad for parameter in task.module.parameters() if parameter.requires_grad]
    assert not any(bool(gradient.any()) for gradient in gradients)


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

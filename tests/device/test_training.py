"""Training on a device that is not the CPU: the CPU's losses, an artifact that loads, and few waits."""

from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from configs.schema.training import HeadsConfig
from distill.dataset.batches import Example, collate
from heads.artifact import load_draft
from tests.device.mock_device import counted
from tests.support.caches import conversation
from tests.support.tiny_heads import HEADS
from tests.support.training_runs import distill_config, draft_task, train_task
from train.launch import make_accelerator
from train.tasks.head import HeadTask

pytestmark = pytest.mark.device

HEAD_SETTINGS = {
    "schedule": {"batch_size": 4, "max_steps": 3, "mixed_precision": "no", "trackers": [], "log_every_steps": 3},
    "held_out": {"num_prompts": 3, "decode": {"num_speculative_tokens": 3, "max_new_tokens": 8}},
}
# Of a forward and a backward: how many places have a label, by depth, and one look of transformers at the mask. A head that
# draws its places asks more.
MOST_WAITS = {"medusa": 7, "hydra": 7, "eagle3": 7, "mtp": 7, "peagle": 22, "dflash": 17, "draft_lm": 8}


@pytest.fixture
def on(mock, monkeypatch, as_target, tiny_llama):
    """A function that puts accelerate and a target of three blocks on a device, by name."""

    def put(name):
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", name)
        return as_target(tiny_llama(seed=1, dtype=torch.float32, layers=3).requires_grad_(False).to(name))

    yield put
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 64, (12, 20), generator=generator).tolist()
    return [conversation(row[:6], row[6 : 14 + number % 6], f"p{number}") for number, row in enumerate(ids)]


def task_of(kind, target, rows, folder):
    if kind == "draft_lm":
        settings = {"schedule": HEAD_SETTINGS["schedule"], "held_out": HEAD_SETTINGS["held_out"]}
        return draft_task(distill_config(folder, settings=settings), target, rows)
    config = HeadsConfig.model_validate(HEAD_SETTINGS | {"head": HEADS[kind], "output": str(folder)})
    return HeadTask(config, target, rows, rows[:3], make_accelerator(config.schedule, Path(config.output)))


@pytest.mark.parametrize("kind", [*HEADS, "draft_lm"])
def test_the_losses_are_the_cpus_and_the_artifact_loads(kind, on, rows, tmp_path):
    results = {}
    for name in ("cpu", "mock"):
        target = on(name)
        torch.manual_seed(0)
        task = task_of(kind, target, rows, tmp_path / name)
        weights, results[name] = train_task(task, rows)
        assert all(each.device.type == name for each in weights.values())
        assert load_draft(str(tmp_path / name / "artifact"), target.identity, target.model).num_parameters
    # Each loss follows the steps before it. Weights are not compared one by one: AdamW's first steps have the gradient's sign.
    assert results["mock"] == pytest.approx(results["cpu"], rel=1e-4)


@pytest.mark.parametrize("kind", [*HEADS, "draft_lm"])
def test_a_micro_batch_waits_only_where_the_number_of_labels_is_asked(kind, on, rows, tmp_path):
    task = task_of(kind, on("mock"), rows, tmp_path / "run")
    batch = collate([Example(row.prompt_ids + row.answer_ids, len(row.prompt_ids)) for row in rows[:4]]).to(
        torch.device("mock")
    )
    task.module.to(batch.input_ids_BT.device)
    labels = batch.loss_mask_BT[:, 1:].sum()
    with counted() as counts:
        task.loss(task.module, batch, labels, 1).loss.backward()
    waits = {place: times for place, times in counts.items() if place[0] in ("out", "wait")}
    assert sum(waits.values()) <= MOST_WAITS[kind], waits

"""Training on a device that is not the CPU: the CPU's losses, an artifact that loads, and few waits."""

from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from configs.schema.training import HeadsConfig
from distill.cache.reader import open_cache
from distill.dataset.batches import Example, collate, collate_packed
from heads.artifact import load_draft
from heads.modules.layers import checkpoint_activations
from tests.device.mock_device import counted
from tests.support.caches import cache_job, conversation, run, write_rows
from tests.support.tiny_heads import HEADS
from tests.support.training_runs import distill_config, draft_task, train_task
from train.launch import make_accelerator
from train.loop import loop
from train.tasks.head import HeadTask

pytestmark = pytest.mark.device

HEAD_SETTINGS = {
    "schedule": {"batch_size": 4, "max_steps": 3, "mixed_precision": "no", "trackers": [], "log_every_steps": 3},
    "held_out": {"num_prompts": 3, "decode": {"num_speculative_tokens": 3, "max_new_tokens": 8}},
}
KINDS = [*HEADS, "dspark", "draft_lm"]
LAYOUTS = [(kind, layout) for kind in KINDS for layout in ("rows", "packed")]
LAYOUTS += [(kind, "checkpointed") for kind in ("eagle3", "mtp", "draft_lm")]
WAITING = ("in", "out", "wait")  # "in": a copy to the device from memory that is not page-locked


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


def task_of(kind, target, rows, folder, cache=None, **changes):
    if kind == "draft_lm":
        settings = {"schedule": HEAD_SETTINGS["schedule"], "held_out": HEAD_SETTINGS["held_out"]}
        return draft_task(distill_config(folder, student={"layers": [0, 2]} | changes, settings=settings), target, rows, cache)
    head = HEADS["dflash"] | {"kind": "dspark", "markov_rank": 4} if kind == "dspark" else HEADS[kind]
    config = HeadsConfig.model_validate(HEAD_SETTINGS | {"head": head | changes, "output": str(folder)})
    return HeadTask(config, target, rows, rows[:3], make_accelerator(config.schedule, Path(config.output)), cache)


@pytest.mark.parametrize("kind", KINDS)
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


def waits(counts):
    """Return what made the host wait, by line."""
    return {place: times for place, times in counts.items() if place[0] in WAITING}


@pytest.mark.parametrize("draft_vocab_size", [None, 32], ids=["whole", "reduced"])
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_forward_and_backward_of_a_micro_batch_never_wait(kind, layout, draft_vocab_size, on, rows, tmp_path):
    task = task_of(kind, on("mock"), rows, tmp_path / "run", draft_vocab_size=draft_vocab_size)
    examples = [Example(row.prompt_ids + row.answer_ids, len(row.prompt_ids)) for row in rows[:4]]
    batch = collate_packed([examples[:2], examples[2:]]) if layout == "packed" else collate(examples)
    if layout == "checkpointed":
        checkpoint_activations(next(task.module.children()))
    batch = batch.to(torch.device("mock"))
    task.module.to(batch.input_ids_BT.device)

    task.loss(task.module, batch, task.source.read(batch)).loss.backward()  # the first one moves tables to the device
    with counted() as counts:
        task.loss(task.module, batch, task.source.read(batch)).loss.backward()
    assert not waits(counts), waits(counts)


@pytest.mark.parametrize("cached", [False, True], ids=["online", "cached"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_its_losses_and_then_for_stop_requests_alone(kind, cached, on, rows, tmp_path, monkeypatch):
    target, cache, steps = on("mock"), None, []
    if cached:
        file = write_rows(tmp_path / "rows.jsonl", rows)
        run(cache_job(target, file, rows, tmp_path / "cache", taps=[1, 2, 3]))
        cache = open_cache(tmp_path / "cache", file, target)
    task = task_of(kind, target, rows, tmp_path / "run", cache)
    plain = loop.Training.step

    def step(*arguments):
        with counted() as counts:
            labels = plain(*arguments)
        steps.append(waits(counts))
        return labels

    monkeypatch.setattr(loop.Training, "step", step)
    train_task(task, rows)
    assert [sum(each.values()) for each in steps[1:]] == [2, 2], steps  # the first one moves tables to the device

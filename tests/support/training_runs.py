"""Training a task on conversations: to its end, or cut off as if the process had been killed; and distillations to train."""

from pathlib import Path

import torch

from configs.schema.training import DistillConfig
from distill.dataset.batches import ConversationDataset, make_loader
from train.launch import make_accelerator
from train.loop.loop import train
from train.loop.telemetry import HELD_OUT, read_lines
from train.tasks.draft import DraftTask


def train_task(task, rows, stop_after=None, max_length=64):
    """Train a task by its own config; return the weights at the end, and the loss of each micro-batch.

    Stop with `KeyboardInterrupt` once `stop_after` micro-batches were trained on.
    """
    plain, losses = task.loss, []

    def loss(*arguments):
        if len(losses) == stop_after:
            raise KeyboardInterrupt
        result = plain(*arguments)
        losses.append(result.loss.detach())  # read at the end: that waits for the device
        return result

    task.loss = loss
    config, accelerator = task.config, task.held_out.accelerator
    rows = ConversationDataset(rows, max_length)
    loader = task.source.loading(make_loader(rows, config.schedule.batch_size, seed=config.schedule.seed))
    train(task, loader, config, accelerator)
    return {name: tensor.clone() for name, tensor in task.module.state_dict().items()}, list(map(float, losses))


def distill_config(folder, student=None, *, settings=None, **schedule):
    """Return the config of a short distillation into a folder; the rest are settings of it that differ."""
    defaults = {"batch_size": 4, "max_steps": 10, "mixed_precision": "no", "trackers": []}
    defaults |= {"log_every_steps": 2, "eval_every_steps": 5, "checkpoint_every_steps": 5}
    return DistillConfig.model_validate(
        {
            "student": {"layers": [0, 2]} | (student or {}),
            "optimizer": {"learning_rate": 3e-3},
            "schedule": defaults | schedule,
            "held_out": {"num_prompts": 3, "decode": {"max_new_tokens": 10, "num_speculative_tokens": 2}},
            "output": str(folder),
        }
        | (settings or {})
    )


def draft_task(config, target, rows, cache=None):
    """Return the task of a distillation that holds its first three conversations out."""
    return DraftTask(config, target, rows, rows[:3], make_accelerator(config.schedule, Path(config.output)), cache)


def distil(config, target, rows, stop_after=None):
    """Distil as configured; return the weights at the end."""
    return train_task(draft_task(config, target, rows), rows, stop_after)[0]


def kept_bytes(step):
    """Run a forward; return the bytes of what it keeps for its backward, parameters apart."""
    kept: dict[int, int] = {}

    def note(tensor):
        whole = tensor if tensor._base is None else tensor._base  # a product keeps a view of its weight
        if not isinstance(whole, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        alive = step()
    del alive
    return sum(kept.values())


def read_metrics(path):
    """Return the lines of a metrics file that are of steps, oldest first."""
    return [row for row in read_lines(path) if not any(name.startswith(HELD_OUT) for name in row)]


def read_evaluations(path):
    """Return the lines that are of evaluations, oldest first, with the metrics' own names."""
    rows = [row for row in read_lines(path) if any(name.startswith(HELD_OUT) for name in row)]
    return [{name.removeprefix(HELD_OUT): value for name, value in row.items()} for row in rows]

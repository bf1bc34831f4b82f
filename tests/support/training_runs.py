"""Conversations of given token ids, and training a task on them: to its end, or cut off as if the process had been killed."""

from pathlib import Path

from distill.dataset.batches import ConversationDataset, make_loader
from distill.dataset.conversations import Conversation
from train.loop.loop import train


def conversation(number, prompt_ids, answer_ids):
    """Return a conversation of these ids, whose answer was cut off."""
    ids = {"prompt_ids": tuple(prompt_ids), "answer_ids": tuple(answer_ids)}
    return Conversation(prompt_id=f"p{number}", category="c", turn=0, messages=(), ended=False, **ids)


def train_task(task, rows, stop_after=None, max_length=64):
    """Train a task by its own config; stop with `KeyboardInterrupt` once `stop_after` micro-batches were trained on.

    Returns:
        The weights at the end, and the loss of each micro-batch.
    """
    plain, losses = task.loss, []

    def loss(*arguments):
        if len(losses) == stop_after:
            raise KeyboardInterrupt
        result = plain(*arguments)
        losses.append(float(result.loss.detach()))
        return result

    task.loss = loss
    config, accelerator = task.config, task.held_out.accelerator
    loader = make_loader(ConversationDataset(rows, max_length), config.schedule.batch_size, seed=config.schedule.seed)
    train(task, loader, config.optimizer, config.schedule, accelerator, Path(config.output), config.model_dump(mode="json"))
    return {name: tensor.clone() for name, tensor in task.module.state_dict().items()}, losses

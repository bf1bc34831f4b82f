"""The evaluations of a run: a line each, none twice, and a warning where both taus part."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from configs.schema.learning import OptimizerConfig
from configs.schema.training import ScheduleConfig
from distill.dataset.batches import ConversationDataset, make_loader
from distill.signals import TargetSignals
from tests.support.training_runs import read_evaluations
from train.launch import make_accelerator
from train.loop.loop import train
from train.loop.task import BatchLoss, Prepared
from train.telemetry.records import METRICS_FILE, explain_gap
from train.telemetry.step_clock import StepClock


class Task:
    """Trains one number; scores are handed in. Stops like a killed process after so many steps."""

    drafts_while_training = False

    def __init__(self, scores, stop_after=None):
        self.module, self.scores, self.steps_left = nn.Linear(1, 1), iter(scores), stop_after
        self.clock = StepClock(torch.device("cpu"))
        self.source = SimpleNamespace(
            reads_ahead=True, num_parameters=0, ahead=lambda batches: batches, read=lambda batch: TargetSignals(None)
        )

    def prepare(self, module, window, step):
        if self.steps_left == 0:
            raise KeyboardInterrupt
        self.steps_left = None if self.steps_left is None else self.steps_left - 1
        return Prepared(batches=window)

    def loss(self, module, batch, signals, num_labels, world_size):
        loss = module(torch.ones(1, 1)).square().sum()
        return BatchLoss(loss=loss, sums={"loss": loss})

    def evaluate(self, module):
        return next(self.scores)

    def save(self, module, progress, metrics):
        pass


def run(task, rows, output, **settings):
    schedule = {"batch_size": 4, "max_steps": 6, "mixed_precision": "no", "trackers": [], "eval_every_steps": 2}
    schedule = ScheduleConfig.model_validate(schedule | {"checkpoint_every_steps": 3} | settings)
    loader = make_loader(ConversationDataset(rows, 64), 4, seed=0)
    train(task, loader, OptimizerConfig(), schedule, make_accelerator(schedule, output), output, {"schedule": {}})


def read(output):
    return read_evaluations(output / METRICS_FILE)


def scores(*taus):
    return [{"tokens_per_target_step": tau, "predicted_tau": 2.0} for tau in taus]


def test_every_evaluation_is_a_line_and_a_resumed_run_writes_none_twice(tmp_path, greedy_rows):
    with pytest.raises(KeyboardInterrupt):
        run(Task(scores(1.1, 1.2), stop_after=5), greedy_rows, tmp_path)
    before = read(tmp_path)
    assert [(row["step"], row["tokens_per_target_step"]) for row in before] == [(2, 1.1), (4, 1.2)]
    run(Task(scores(1.3, 1.4)), greedy_rows, tmp_path)  # goes on from step 3: step 4 is evaluated anew
    after = read(tmp_path)
    assert [(row["step"], row["tokens_per_target_step"]) for row in after] == [(2, 1.1), (4, 1.3), (6, 1.4)]
    assert after[0] == before[0]
    assert before[0]["seconds"] < after[1]["seconds"] < after[2]["seconds"]


def test_a_run_from_the_start_drops_earlier_evaluations(tmp_path, greedy_rows):
    run(Task(scores(1.1, 1.2, 1.3)), greedy_rows, tmp_path)
    run(Task(scores(1.4)), greedy_rows, tmp_path, resume=False, eval_every_steps=None)
    assert [(row["step"], row["tokens_per_target_step"]) for row in read(tmp_path)] == [(6, 1.4)]


def test_a_gap_at_the_end_of_training_is_a_warning_with_both_numbers(tmp_path, greedy_rows, caplog):
    run(Task(scores(1.1, 1.9, 1.2)), greedy_rows, tmp_path)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "decoded at 1.200 tokens per target step" in warning
    assert "predicts 2.000" in warning


@pytest.mark.parametrize(
    ("decoded", "predicted", "is_gap"), [(1.81, 2.0, False), (1.79, 2.0, True), (1.0, 1.0, False), (1.2, None, False)]
)
def test_a_gap_is_less_than_four_fifths_of_the_promised_gain(decoded, predicted, is_gap):
    metrics = {"tokens_per_target_step": decoded} | ({} if predicted is None else {"predicted_tau": predicted})
    assert (explain_gap(metrics) is not None) == is_gap

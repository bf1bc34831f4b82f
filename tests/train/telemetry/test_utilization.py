"""The operations of a training: counted as on paper, and predicted for micro-batches that were not counted."""

from itertools import count

import pytest
import torch
from torch import nn

from configs.schema.training import ScheduleConfig
from distill.dataset.batches import Example, collate
from eval.cost.operation_counter import WorkCounter
from tests.support.tiny_heads import HEADS
from tests.support.training_runs import distill_config, draft_task
from train.launch import make_accelerator
from train.telemetry import utilization as flops
from train.telemetry.utilization import FlopMeter, find_peak, measure_peak

CPU = torch.device("cpu")


def batch_of(lengths, answer=6):
    """Conversations of these lengths, the last `answer` tokens of each the target's."""
    generator = torch.Generator().manual_seed(sum(lengths))
    texts = [torch.randint(5, 64, (length,), generator=generator).tolist() for length in lengths]
    return collate([Example(tuple(text), len(text) - answer, number) for number, text in enumerate(texts)])


def train_on(task, batch):
    task.loss(task.module, batch, batch.loss_mask_BT.sum(), 1).loss.backward()
    task.module.zero_grad()


def counted(task, batch):
    with WorkCounter() as counter:
        train_on(task, batch)
    return counter.flops


def on_paper(task, batch):
    """Two operations a weight and position forward, twice that backward; a query and a value of each head with every key."""

    def forward(model):
        linear = sum(each.weight.numel() for each in model.model.layers.modules() if isinstance(each, nn.Linear))
        config = model.config
        attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
        return B * T * (2 * linear + T * attention)

    (B, T), num_labels = batch.input_ids_BT.shape, int(batch.loss_mask_BT[:, 1:].sum())
    head = 2 * task.target.model.lm_head.weight.numel() * num_labels
    both_heads = (2 + 1 + task.module.draft.lm_head.weight.requires_grad) * head  # the draft's: forward, states, weights
    return forward(task.target.model) + 3 * forward(task.module.draft) + both_heads


@pytest.fixture
def draft(tmp_path, greedy_target, greedy_rows):
    return draft_task(distill_config(tmp_path), greedy_target, greedy_rows)


def test_the_operations_of_a_draft_are_those_on_paper(draft):
    for batch in (batch_of([12]), batch_of([20, 31, 9])):
        # The rotary angles are a product of their own, of 8 operations a position.
        assert counted(draft, batch) == pytest.approx(on_paper(draft, batch), rel=1e-3)


def learnt(task):
    """A meter that has counted, and then sees batches of which it does not."""
    meter = FlopMeter()
    for lengths in ([12, 14], [30, 22], [17], [40, 9, 11]):
        with meter.micro_batch(batch := batch_of(lengths)):
            train_on(task, batch)
    meter.take()
    return meter


def test_what_is_not_counted_follows_from_the_shape(draft):
    meter, batches = learnt(draft), [batch_of([25, 19, 13, 28]), batch_of([8]), batch_of([50, 44], answer=20)]
    for batch in batches:
        with meter.micro_batch(batch):
            pass
    assert meter.take() == pytest.approx(sum(counted(draft, batch) for batch in batches), rel=1e-3)
    assert meter.take() == 0


@pytest.mark.parametrize("kind", HEADS)
def test_what_a_head_computes_follows_from_the_shape(head_task, kind):
    task = head_task(kind)
    meter, batches = learnt(task), [batch_of([25, 19, 13, 28]), batch_of([33, 31])]
    for batch in batches:
        with meter.micro_batch(batch):
            pass
    # P-EAGLE draws which positions it trains, and cannot be known to the digit.
    expected = sum(counted(task, batch) for batch in batches)
    assert meter.take() == pytest.approx(expected, rel=0.08 if kind == "peagle" else 1e-3)


def test_ever_fewer_micro_batches_are_counted(monkeypatch):
    entered = []
    monkeypatch.setattr(WorkCounter, "__enter__", lambda counter: entered.append(1) or counter)
    monkeypatch.setattr(WorkCounter, "__exit__", lambda *_: None)
    meter, numbers = FlopMeter(), []
    for number in range(1, 40):
        with meter.micro_batch(batch_of([8])):
            pass
        if len(entered) > len(numbers):
            numbers.append(number)
    assert numbers == [1, 2, 3, 4, 8, 16, 32]


def test_the_peak_is_that_of_the_largest_product_that_was_tried(monkeypatch):
    measure_peak.cache_clear()
    ticks = count()
    seconds = {256: 0.001, 512: 0.004, 1024: 0.021}
    monkeypatch.setattr(flops, "_seconds_of_product", lambda matrix: seconds[len(matrix)] * (1 + next(ticks) % 2))
    assert measure_peak(CPU, torch.float32) == pytest.approx(2 * 1024**3 / 0.021)
    measure_peak.cache_clear()


def test_a_peak_that_the_config_gives_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(flops, "measure_peak", None)
    schedule = ScheduleConfig(mixed_precision="no", trackers=[], peak_tflops=2.5)
    assert find_peak(make_accelerator(schedule, tmp_path), schedule) == 2.5e12

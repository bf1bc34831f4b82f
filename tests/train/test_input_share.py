"""The share of waiting in a step: of a slow pipeline it is large, and epochs follow each other."""

import time

import pytest

from distill.batches import ConversationDataset, make_loader
from distill.conversations import Conversation
from train.input_share import InputShare, measure_input_share


class Slow(ConversationDataset):
    """Rows that take 4 ms each."""

    def __getitem__(self, index):
        time.sleep(0.004)
        return super().__getitem__(index)


@pytest.fixture
def rows():
    return [
        Conversation(
            prompt_id=f"p{number}",
            category="c",
            turn=0,
            messages=(),
            prompt_ids=(number + 1,),
            answer_ids=(7,) * (1 + number % 3),
            ended=True,
        )
        for number in range(12)
    ]


def test_waiting_and_working_are_told_apart(rows):
    measured = measure_input_share(make_loader(Slow(rows, 8), 4, seed=0), lambda batch: time.sleep(0.048), 4)
    assert measured.num_steps == 4
    assert measured.first_batch_seconds >= 0.016
    assert 0.064 <= measured.input_seconds < measured.step_seconds
    assert measured.step_seconds >= 0.192
    assert 0.02 < measured.share < 0.5


def test_every_epoch_is_gone_through_in_its_own_order(rows):
    loader, seen = make_loader(ConversationDataset(rows, 8), 4, seed=0), []
    measure_input_share(loader, lambda batch: seen.append(batch.conversations_BC[:, 0].tolist()), 5)
    assert len(seen) == 6
    for epoch in (0, 1):
        loader.batch_sampler.set_epoch(epoch)
        assert seen[3 * epoch : 3 * epoch + 3] == [batch.conversations_BC[:, 0].tolist() for batch in loader]


def test_the_share_is_that_of_waiting():
    share = InputShare(num_steps=1, first_batch_seconds=9.0, input_seconds=1.0, step_seconds=3.0).share
    assert share == 0.25

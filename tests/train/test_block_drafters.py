"""Training heads on blocks at random anchors: a resumed run draws the anchors that the undisturbed one would have drawn."""

import pytest
import torch

from heads.families import dflash
from tests.support.training_runs import train_task
from train.loop.checkpoints import list_checkpoints

DSPARK = {"kind": "dspark", "taps": [1, 2, 3], "block_size": 4, "num_anchors": 2, "mask_token_id": 0, "markov_rank": 4}


@pytest.fixture
def drawn(monkeypatch):
    """The anchors of every training forward, in turn."""
    places = []
    choose = dflash.choose_anchors

    def choose_and_note(batch, limit):
        anchors = choose(batch, limit)
        if limit is not None:
            places.append(anchors.places_BA.tolist())
        return anchors

    monkeypatch.setattr(dflash, "choose_anchors", choose_and_note)
    return places


def run(head_task, folder, rows, stop_after=None):
    """Train six steps with a checkpoint after three; return the head's weights at the end."""
    schedule = {"batch_size": 4, "max_steps": 6, "mixed_precision": "no", "trackers": [], "checkpoint_every_steps": 3}
    task = head_task("dflash", head=DSPARK, schedule=schedule, output=str(folder))
    task.evaluate = lambda module: {"tokens_per_target_step": 1.0}
    return train_task(task, rows, stop_after)[0]


def test_a_resumed_run_draws_the_same_anchors_and_ends_in_the_same_bits(tmp_path, head_task, greedy_rows, drawn):
    whole = run(head_task, tmp_path / "whole", greedy_rows)
    undisturbed = drawn.copy()
    assert len(undisturbed) == 6
    drawn.clear()
    with pytest.raises(KeyboardInterrupt):
        run(head_task, tmp_path / "parts", greedy_rows, stop_after=4)
    assert [path.name for path in list_checkpoints(tmp_path / "parts" / "checkpoints")] == ["step-00000003"]
    del drawn[3:]
    resumed = run(head_task, tmp_path / "parts", greedy_rows)
    assert drawn == undisturbed
    assert len({str(places) for places in drawn}) == 6
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name

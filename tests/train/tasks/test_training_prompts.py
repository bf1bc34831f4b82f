"""What a training begins with: which prompts it knows that its draft was trained on."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from distill.dataset.conversations import index_of
from heads.metadata import METADATA_FILE, PROMPTS_FILE
from tests.support.training_runs import distil, distill_config, draft_task, train_task


@pytest.fixture
def rows(greedy_rows):
    """Conversations whose prompts differ."""
    return [
        dataclasses.replace(row, messages=({"role": "user", "content": f"w{number}"}, *row.messages[1:]))
        for number, row in enumerate(greedy_rows)
    ]


def test_a_head_knows_the_prompts_of_the_artifact_it_goes_on_from_or_none_where_that_does_not_say(
    head_task, rows, tmp_path, monkeypatch
):
    first = head_task(train=rows[:3])
    train_task(first, rows[:3])
    artifact = Path(first.config.output) / "artifact"
    others, output = rows[3:], str(tmp_path / "next")
    both = head_task(init=str(artifact), train=others, output=output).training_prompts
    assert np.array_equal(np.unique(both), np.unique(index_of(rows).user_texts))
    assert set(both) > set(index_of(others).user_texts)
    (artifact / PROMPTS_FILE).unlink()  # as published
    monkeypatch.setattr("train.tasks.head.locate_artifact", lambda name: artifact)
    task = head_task(init="owner/name", train=others, output=output)
    assert task.training_prompts is None
    train_task(task, others)
    assert not (tmp_path / "next" / "artifact" / PROMPTS_FILE).exists()


def test_a_draft_lm_knows_as_much_and_counts_a_plain_model_as_trained_on_no_prompt(greedy_target, rows, tmp_path):
    distil(distill_config(tmp_path / "first", max_steps=1), greedy_target, rows[:4])
    artifact, others = tmp_path / "first" / "artifact", rows[4:]
    student = {"init": "model", "path": str(artifact), "layers": None}

    def known():
        return draft_task(distill_config(tmp_path / "next", student), greedy_target, others).training_prompts

    assert np.array_equal(np.unique(known()), np.unique(index_of(rows).user_texts))
    (artifact / PROMPTS_FILE).unlink()
    assert known() is None
    (artifact / METADATA_FILE).unlink()
    assert np.array_equal(known(), index_of(others).user_texts)

"""What a training begins with: its draft vocabulary, and the prompts that it knows its draft was trained on."""

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest

from configs.runtime.errors import ConfigError
from distill.dataset.conversations import index_of
from heads.metadata import METADATA_FILE, PROMPTS_FILE
from tests.support.caches import conversation
from tests.support.training_runs import distil, distill_config, draft_task, train_task
from train.resolve import choose_vocabulary


@pytest.fixture
def target(tiny_llama, as_target):
    return as_target(tiny_llama(layers=1), eos=(1, 2))


ROWS = [conversation((50, 50, 50, 50), (40, 9, 9, 33)), conversation((51,), (40, 9, 33, 20, 12))]


def test_the_most_frequent_answer_tokens_are_taken_and_ties_go_to_the_lower_id(target, caplog):
    with caplog.at_level(logging.INFO, logger="draftsmith"):
        chosen = choose_vocabulary(6, target, ROWS)
    # 9 comes three times, 33 and 40 twice; of 12 and 20, once each, one fits. Prompt tokens do not count; 1 and 2 end answers.
    assert chosen.token_ids_W.tolist() == [1, 2, 9, 12, 33, 40]
    assert chosen.target_vocab_size == 64
    assert "6 of 64 tokens, 88.89 %" in caplog.text


@pytest.mark.parametrize("size", [1, 65])
def test_a_size_that_cannot_be_is_refused_with_what_can(target, size):
    with pytest.raises(ConfigError, match=rf"^draft_vocab_size: expected 2 .* to 64 .*, got {size}"):
        choose_vocabulary(size, target, ROWS)


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

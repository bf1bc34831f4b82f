"""The draft vocabulary of a run by the target's mass: the same from a cache and when resumed, and reported in the artifact."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from distill.dataset.batches import ConversationDataset
from tests.support.training_runs import distill_config, draft_task, train_task
from train.launch import open_training_cache
from train.loop.checkpoints import Progress
from train.tasks.head import HeadTask
from train.tasks.start import choose_vocabulary

BY_MASS = {"draft_vocab_by": "mass", "draft_vocab_size": 20}


def naive_choice(target, rows, size):
    """Return the tokens of most mass, end tokens first, one conversation at a time in float64."""
    mass_V = torch.zeros(64, dtype=torch.float64)
    for row in rows:
        p_TV = target.model(torch.tensor([row.prompt_ids + row.answer_ids])).logits[0].double().softmax(-1)
        mass_V += p_TV[len(row.prompt_ids) - 1 : -1].sum(0)
    mass_V[list(target.eos_token_ids)] = float("inf")
    return sorted(mass_V.argsort(descending=True)[:size].tolist())


@pytest.mark.parametrize("cached", [False, True], ids=["online", "cached"])
def test_a_head_gets_the_tokens_of_most_mass(head_task, greedy_target, greedy_rows, make_cache, tmp_path, cached):
    rows = [dataclasses.replace(row, category=("even", "odd")[number % 2]) for number, row in enumerate(greedy_rows)]
    task = head_task(head=BY_MASS, train=rows, held_out=rows[:5])
    if cached:
        folder = make_cache(rows, taps=[1, 2, 3], dtype="float32", batch_size=4)
        data = {"train": str(tmp_path / "train.jsonl"), "max_length": 64, "cache": str(folder)}
        changes = {"data": task.config.data.model_copy(update=data), "output": str(tmp_path / "cached")}
        config = task.config.model_copy(update=changes)
        cache = open_training_cache(config, ConversationDataset(rows, 64), greedy_target)
        task = HeadTask(config, greedy_target, rows, rows[:5], task.held_out.accelerator, cache)
    assert task.vocabulary.token_ids_W.tolist() == naive_choice(greedy_target, rows, 20)
    folder = tmp_path / "artifact"
    task.write(folder, task.module, Progress(), {})
    reported = json.loads((folder / "draftsmith.json").read_text())["provenance"]["draft_vocabulary"]
    assert reported["uncovered_mass"] == task.evaluate(task.module)["uncovered_mass"] > 0
    assert set(reported["uncovered_mass_by_kind"]) == {"even", "odd"}


def test_a_resumed_run_keeps_the_tokens_it_was_trained_with(head_task, greedy_rows, monkeypatch):
    first = head_task(head={"draft_vocab_by": "mass"})
    assert first.choice.report["size"] == (first.config.head.draft_vocab_size or 64)
    monkeypatch.setattr("train.tasks.start.target_mass", lambda *_: pytest.fail("measured anew"))
    again = head_task(head={"draft_vocab_by": "mass"})
    assert again.choice.report == first.choice.report
    with pytest.raises(pytest.fail.Exception):
        head_task(head=BY_MASS)
    others = [dataclasses.replace(row, answer_ids=row.answer_ids[::-1]) for row in greedy_rows]
    with pytest.raises(pytest.fail.Exception):
        head_task(head={"draft_vocab_by": "mass"}, train=others)


@pytest.mark.parametrize("head", [{"draft_vocab_size": 20}, BY_MASS], ids=["by counts", "by mass"])
def test_a_run_that_goes_on_with_other_data_keeps_the_tokens_of_its_weights_rows(head_task, greedy_rows, head):
    others = [dataclasses.replace(row, answer_ids=tuple(token % 10 + 5 for token in row.answer_ids)) for row in greedy_rows]

    def tokens(rows):
        return head_task(head=head, train=rows).vocabulary.token_ids_W.tolist()

    found = tokens(greedy_rows)
    assert tokens(others) != found  # there is nothing yet to go on from
    assert tokens(greedy_rows) == found
    train_task(head_task(head=head), greedy_rows)
    assert tokens(others) == found


def test_a_draft_lm_gets_them_too(tmp_path, greedy_target, greedy_rows):
    config = distill_config(tmp_path, BY_MASS)
    task = draft_task(config, greedy_target, greedy_rows)
    assert task.vocabulary.token_ids_W.tolist() == naive_choice(greedy_target, greedy_rows, 20)
    assert Path(config.output, "draft_vocabulary.json").is_file()
    by_counts = distill_config(tmp_path, {"draft_vocab_size": 20})
    found = choose_vocabulary(by_counts, greedy_target, greedy_rows, greedy_rows[:3], task.accelerator, None)
    assert found.vocabulary.token_ids_W.tolist() != task.vocabulary.token_ids_W.tolist()

"""The gates before a run: a right head passes, a head that drafts from something else does not, and nothing of it stays."""

import dataclasses
import logging

import pytest
import torch

from configs.errors import ConfigError, InputError
from distill.batches import ConversationDataset, make_loader
from heads.eagle3 import Eagle3
from heads.unread import Unread
from tests.train.tiny_heads import HEADS
from train import head_task as head_task_module
from train.loop import train
from train.sanity import check_before_training, choose_text


def check(task, rows):
    check_before_training(task, ConversationDataset(rows, 64), task.held_out.accelerator)


@pytest.mark.parametrize("kind", HEADS)
def test_a_right_head_passes_and_one_line_says_what_was_seen(kind, head_task, greedy_rows, caplog, tmp_path):
    caplog.set_level(logging.INFO, "draftsmith")
    check(head_task(kind), greedy_rows)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("sanity")]
    assert "3 of 3 drafts accepted, agreement in training by depth" in line
    assert list((tmp_path / "run").iterdir()) == []


def test_drafting_from_the_token_before_is_found_out(head_task, greedy_rows, monkeypatch):
    right = Unread.next_tokens
    monkeypatch.setattr(Unread, "next_tokens", lambda unread, tokens: right(unread, [[row[0], *row[:-1]] for row in tokens]))
    with pytest.raises(RuntimeError, match=r"not explain \(draft [1-3] of .*drafts from something else than it was trained on"):
        check(head_task(), greedy_rows)


def test_labels_one_place_too_late_are_found_out(head_task, greedy_rows, monkeypatch):
    right = Eagle3.forward

    def late(head, inputs):
        last = inputs.input_ids_BT.numel() - 1
        return [dataclasses.replace(depth, judged_N=(depth.judged_N + 1).clamp(max=last)) for depth in right(head, inputs)]

    monkeypatch.setattr(Eagle3, "forward", late)
    with pytest.raises(InputError, match=r"[0-2] of 3 drafts accepted, .*labels of another place"):
        check(head_task(), greedy_rows)


def test_a_head_that_does_not_learn_is_told_apart(head_task, greedy_rows):
    task = head_task(sanity={"learning_rate": 1e-9, "overfit_steps": 3})
    with pytest.raises(
        InputError, match=r"after 3 steps .* does not learn a single conversation.* raise sanity\.overfit_steps"
    ):
        check(task, greedy_rows)


def test_an_artifact_that_loses_weights_is_found_out(head_task, greedy_rows, monkeypatch):
    right = head_task_module.save_head

    def losing(folder, head, *args):
        torch.nn.init.zeros_(head.layers[0].self_attn.o_proj.weight)
        right(folder, head, *args)

    monkeypatch.setattr(head_task_module, "save_head", losing)
    with pytest.raises(RuntimeError, match="untrained eagle3 head drafts other tokens after it was written and loaded"):
        check(head_task(), greedy_rows)


def test_the_text_is_the_shortest_that_serves_in_the_target_s_own_words(head_task, greedy_rows):
    task = head_task()
    sampled = [dataclasses.replace(row, answer_ids=row.answer_ids[::-1]) for row in greedy_rows]
    short = dataclasses.replace(greedy_rows[3], answer_ids=greedy_rows[3].answer_ids[:5])
    text = choose_text(task, ConversationDataset([short, *sampled[::-1]], 64))
    row = sampled[len(sampled) - text.conversation]
    assert len(row.answer_ids) == min(len(row.answer_ids) for row in sampled)
    greedy = next(each for each in greedy_rows if each.prompt_id == row.prompt_id)
    assert text.input_ids[: 6 + len(greedy.answer_ids)] == greedy.prompt_ids + greedy.answer_ids
    assert text.answer_start == 6


@pytest.mark.parametrize("answer", [(7, 8, 9, 10, 11), (7,) * 12], ids=["short", "one token"])
def test_without_a_text_that_serves_the_run_is_refused(head_task, greedy_rows, answer):
    rows = [dataclasses.replace(row, answer_ids=answer) for row in greedy_rows]
    with pytest.raises(ConfigError, match=r"0 of 16 conversations have an answer of at least 6 tokens .* sanity\.enabled"):
        check(head_task(), rows)


def test_a_text_outside_the_draft_vocabulary_does_not_serve(head_task, greedy_rows):
    spoken = sorted({token for row in greedy_rows for token in row.answer_ids})
    task = head_task(head={"draft_vocab_size": len(spoken) // 3})
    known = set(task.vocabulary.token_ids_W.tolist())
    text = choose_text(task, ConversationDataset(greedy_rows, 64))
    assert set(text.input_ids[text.answer_start + 1 : text.answer_start + 4]) <= known


def test_training_is_the_same_to_the_bit_with_and_without_the_gates(head_task, greedy_rows, tmp_path):
    weights = []
    for enabled in (True, False):
        # Noise and anchors are drawn from torch's own generator, whose state shows in the weights.
        task = head_task("dflash", head={"tap_noise": 0.1, "num_anchors": 2}, output=str(tmp_path / f"run-{enabled}"))
        if enabled:
            state = torch.get_rng_state()
            check(task, greedy_rows)
            assert torch.equal(torch.get_rng_state(), state)
        config = task.config
        loader = make_loader(ConversationDataset(greedy_rows, 64), config.schedule.batch_size, seed=0)
        train(
            task,
            loader,
            config.optimizer,
            config.schedule,
            task.held_out.accelerator,
            tmp_path / str(enabled),
            {"schedule": {}},
        )
        weights.append({name: tensor.clone() for name, tensor in task.module.state_dict().items()})
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())

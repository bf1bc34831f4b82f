"""The prediction from training is what decoding yields, to the last round, as long as both do the same thing."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.training import HeadsConfig
from distill.dataset.batches import Example, collate
from eval.decoder.decode import decode
from tests.support.tiny_heads import HEADS
from train.tasks.head import HeadTask
from train.tasks.held_out import walk


def train_some(task, rows, steps, learning_rate=1e-2):
    """Train on all rows together, so far that the head is sometimes right and sometimes not."""
    examples = [Example(row.prompt_ids + row.answer_ids, len(row.prompt_ids)) for row in rows]
    batch = collate(examples)
    optimizer = torch.optim.AdamW(task.module.parameters(), lr=learning_rate, weight_decay=0.0)
    for _ in range(steps):
        loss = task.loss(task.module, batch, task.source.read(batch)).loss / batch.num_labels
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("kind", HEADS)
def test_the_predicted_tau_is_the_decoded_one_on_greedy_answers(kind, head_task, greedy_rows):
    task = head_task(kind, held_out=greedy_rows[4:9])  # whose answers are as long as what is decoded
    train_some(task, greedy_rows, steps=40)
    metrics = task.evaluate(task.module)
    assert metrics["predicted_tau"] == pytest.approx(metrics["tokens_per_target_step"], abs=1e-6)
    assert 1.3 < metrics["predicted_tau"] < 3.9


@pytest.mark.parametrize(
    ("kind", "refused"), [("dflash", pytest.raises(InputError, match="chains only")), ("eagle3", nullcontext())]
)
def test_a_tree_that_the_head_cannot_draft_is_refused_before_the_training(kind, refused, head_task, greedy_target, greedy_rows):
    task = head_task(kind)
    decode = {"num_speculative_tokens": 2, "tree": {"kind": "static", "paths": [[0], [1], [0, 0]]}}
    config = HeadsConfig.model_validate(task.config.model_dump() | {"held_out": {"decode": decode}})
    with refused:
        HeadTask(config, greedy_target, greedy_rows, greedy_rows[:2], task.held_out.accelerator)


def test_the_shares_by_depth_are_those_counted_place_by_place(head_task, greedy_rows):
    task = head_task("medusa")
    train_some(task, greedy_rows, steps=30)
    metrics = task.held_out.predict(task.module, task.states)
    reached, agreed, origins = [0] * 3, [0] * 3, [0] * 3
    for row in greedy_rows[:5]:
        answer = row.answer_ids[:12]
        ids, first = row.prompt_ids + answer, len(row.prompt_ids) - 1
        states = task.states(collate([Example(ids, len(row.prompt_ids))]))
        for origin in range(first, len(ids) - 2):
            alive = True
            for depth in range(min(3, len(ids) - 2 - origin)):
                drafted = task.module.head.draft_logits(states.final_BTE[:, origin], 3)[depth].argmax()
                wanted = task.target.model(input_ids=torch.tensor([ids[: origin + 2 + depth]])).logits[0, -1].argmax()
                reached[depth] += alive
                alive = alive and bool(drafted == wanted)
                agreed[depth] += alive
                origins[depth] += 1
    for depth in range(3):
        assert metrics[f"conditional_{depth + 1}"] == pytest.approx(agreed[depth] / reached[depth])
        assert metrics[f"joint_{depth + 1}"] == pytest.approx(agreed[depth] / origins[depth])
    assert metrics["conditional_1"] != metrics["joint_2"]


def test_an_evaluation_leaves_the_random_numbers_of_training_as_they_were(head_task, greedy_rows):
    task = head_task("dflash", held_out=greedy_rows[4:9])  # whose training draws anchors
    before = torch.get_rng_state()
    first, second = task.evaluate(task.module), task.evaluate(task.module)
    assert torch.equal(torch.get_rng_state(), before)
    assert first == second


def test_the_score_is_of_the_first_prompts_and_counts_a_round_that_an_accepted_end_of_text_closes(
    head_task, greedy_target, greedy_rows
):
    ending = replace(greedy_target, eos_token_ids=(greedy_rows[4].answer_ids[3],))
    settings = {"num_speculative_tokens": 3, "max_new_tokens": 12, "batch_size": 2}
    scored = {"num_prompts": 3, "decode": settings}
    task = head_task("eagle3", target=ending, held_out=greedy_rows[4:12], scored=scored)
    train_some(task, greedy_rows, steps=60)
    requests = task.held_out.requests
    assert [each.prompt_id for each in requests] == [f"{row.prompt_id}/0" for row in greedy_rows[4:7]]
    proposer = task.proposer(task.module)
    generations, _ = decode(ending, requests, task.held_out.decode, proposer)
    rounds = [each for generation in generations for each in generation.rounds]
    assert any(len(each.committed) == each.num_accepted for each in rounds)
    expected = sum(len(each.committed) for each in rounds) / len(rounds)
    found = task.held_out.score(proposer)
    assert found["tokens_per_target_step"] == pytest.approx(expected)
    drafted = sum(each.num_drafted for each in rounds)
    assert found["draft_token_yield"] == pytest.approx(sum(each.num_accepted for each in rounds) / drafted)


@pytest.mark.parametrize(
    "changes", [{"temperature": 1.0}, {"stopping": {"rule": "confidence", "threshold": 0.9}}], ids=["sampled", "stopped"]
)
def test_what_is_drawn_or_stopped_has_no_prediction(head_task, greedy_rows, changes):
    decode = {"num_speculative_tokens": 2, "max_new_tokens": 8, **changes}
    task = head_task("medusa", held_out=greedy_rows[:3])
    settings = HeadsConfig.model_validate(task.config.model_dump() | {"held_out": {"num_prompts": 3, "decode": decode}})
    other = HeadTask(settings, task.target, greedy_rows, greedy_rows, task.held_out.accelerator)
    metrics = other.held_out.predict(task.module, task.states)
    assert "predicted_tau" not in metrics
    assert "joint_2" in metrics
    assert "joint_3" not in metrics


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        ([0] * 9, (5, 5)),
        ([9] * 9, (5, 2)),  # 3 drafts and the target's own, then none: the last token is the target's
        ([0, 0, 1, 0, 0, 1, 2, 0, 0], (5, 3)),
        ([0, 0, 1, 0, 2, 0, 0, 0, 0], (5, 2)),
    ],
    ids=["never", "always", "some", "others"],
)
def test_a_walk_takes_the_steps_that_decoding_would_take(accepted, expected):
    # A prompt of 3 tokens and an answer of 6, at 3 to 8; the first pending token stands at 3, its origin is 2.
    assert walk(accepted, 3, 9, 3) == expected
    assert walk(accepted, 3, 4, 3) == (0, 0)  # an answer of one token takes no round

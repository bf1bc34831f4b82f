"""EAGLE-3's training beside speculators', and its attention beside dense one: both sides do the same work."""

import dataclasses

import pytest
import torch

from configs.runtime.loading import load_config
from configs.schema.training import HeadsConfig
from distill.dataset.batches import Example, collate
from scripts.lab.bench.eagle3_training import (
    ANSWERS,
    EVERY_TOKEN,
    OURS,
    THEIRS,
    TOLERANCE,
    TrainingComparison,
    comparable,
    compare_eagle3,
    make_cases,
    make_task,
    name_of,
    our_side,
    their_side,
)
from scripts.lab.bench.harness import TrainingStep
from scripts.lab.bench.peers.speculators_eagle3 import pack, why_not_installed
from scripts.trials.turns import Turn
from train.launch import make_accelerator

RATIO = "eagle3_tokens_per_second_vs_speculators"
with_speculators = pytest.mark.skipif(why_not_installed() is not None, reason="speculators is not installed")
ignoring_its_warnings = pytest.mark.filterwarnings("ignore")


def test_ratios_and_rows_are_tokens_by_seconds():
    seconds_a_token = {(OURS, ANSWERS): 2, (THEIRS, ANSWERS): 3, (OURS, EVERY_TOKEN): 4, (THEIRS, EVERY_TOKEN): 6}
    turns = {
        name_of(*side): [[Turn(TrainingStep(num_tokens=tokens, loss=1.0), tokens * each)] for tokens in (10, 30)]
        for side, each in seconds_a_token.items()
    }
    comparison = TrainingComparison(turns=turns, losses=dict.fromkeys(turns, 1.0), batch_size=4)
    ratios = comparison.ratios(samples=20)
    assert {name: ratio.point for name, ratio in ratios.items()} == pytest.approx({RATIO: 1.5, f"same_work_{RATIO}": 1.5})
    rows = {(row["training"], row["labels"]): row for row in comparison.rows()}
    assert rows["eagle3, ours", "answers"]["tokens_per_second"] == pytest.approx(1 / 2)
    assert rows["eagle3, speculators", "every token"]["tokens_per_second"] == pytest.approx(1 / 6)
    assert {row["steps"] for row in rows.values()} == {2}


def test_a_packed_row_pairs_each_token_with_the_state_before_it_and_the_label_after_it():
    batch = collate([Example((10, 11, 12, 13), 2), Example((20, 21), 1)])
    states_BTE = batch.input_ids_BT.unsqueeze(-1).float() + 0.5  # the state after a token bears its number
    row = pack(batch, states_BTE, states_BTE + 100)
    assert row.input_ids_1S.tolist() == [[11, 12, 13, 21]]
    assert row.hidden_states_1SF.squeeze(-1).tolist() == [[10.5, 11.5, 12.5, 20.5]]
    assert row.last_states_1SE.squeeze(-1).tolist() == [[111.5, 112.5, 113.5, 121.5]]
    assert row.loss_mask_1S.tolist() == [[True, True, False, False]]  # by whether 12, 13 are labels; then nothing follows
    assert row.document_ids_1S.tolist() == [[0, 0, 0, 1]]
    assert row.position_ids_1S.tolist() == [[1, 2, 3, 1]]


def head_recipe(folder, **settings):
    recipe = comparable(load_config(HeadsConfig, folder / "eagle3.yaml"))
    return recipe.model_copy(update={"head": recipe.head.model_copy(update=settings)})


def test_no_label_of_a_case_can_be_reached_from_another_conversation(target, folder, tmp_path):
    recipe = head_recipe(folder)
    task = make_task(recipe, target, make_accelerator(recipe.schedule, tmp_path))
    cases = make_cases(2, task)
    K = recipe.head.num_depths
    for labels, own in cases.items():
        assert len(own) == 2
        for case in own:
            mask_BT, real_BT = case.batch.loss_mask_BT, case.batch.document_ids_BT >= 0
            assert not mask_BT[:, : K + 1].any()
            if labels == EVERY_TOKEN:
                assert torch.equal(mask_BT[:, K + 1 :], real_BT[:, K + 1 :])
            assert int(case.num_labels) == int(mask_BT.sum()) == int(case.theirs.loss_mask_1S.sum())
            assert case.num_tokens == int(real_BT.sum())
    assert int(cases[ANSWERS][0].num_labels) < int(cases[EVERY_TOKEN][0].num_labels)


VARIANTS = [
    {},
    {"num_layers": 2, "norm_taps": True, "depth_decay": 0.5},
    {"norm_before_residual": True, "norm_feedback": True, "draft_vocab_size": None, "num_depths": 1},
]


@with_speculators
@ignoring_its_warnings
@pytest.mark.parametrize("settings", VARIANTS)
def test_both_sides_have_the_same_loss_and_gradient_and_learn_alike(target, folder, tmp_path, settings):
    recipe = head_recipe(folder, **settings)
    accelerator = make_accelerator(recipe.schedule, tmp_path)
    task = make_task(recipe, target, accelerator)
    ours, theirs = our_side(task, accelerator), their_side(task, accelerator)
    own = dict(task.module.head.named_parameters())
    cases = [case for each in make_cases(2, task).values() for case in each]
    for case in cases:
        assert ours.loss(case) == pytest.approx(theirs.loss(case), rel=1e-4)  # theirs adds 1e-5 to the number of labels
        (ours.loss_of(case) * ours.scale).backward()
        theirs.loss_of(case).backward()
        gradients = {name: each.grad for name, each in theirs.module.model.named_parameters() if each.grad is not None}
        assert gradients.keys() == own.keys()
        for name, gradient in gradients.items():
            assert torch.allclose(own[name].grad, gradient, atol=1e-4 * gradient.abs().max().item()), name
        ours.optimizer.zero_grad()
        theirs.optimizer.zero_grad()
    shifted = dataclasses.replace(cases[0], batch=cases[0].batch._replace(loss_mask_BT=cases[0].batch.loss_mask_BT.roll(-1, 1)))
    assert ours.loss(shifted) != pytest.approx(theirs.loss(cases[0]), rel=TOLERANCE)
    for case in cases:  # AdamW makes much of the rounding of small gradients
        assert ours.step(case).loss == pytest.approx(theirs.step(case).loss, rel=1e-2)


@with_speculators
@ignoring_its_warnings
def test_the_benchmark_times_both_sides_on_the_same_batches(make_config, target, folder, tmp_path):
    recipe = load_config(HeadsConfig, folder / "eagle3.yaml")
    comparison = compare_eagle3(make_config(), target, recipe, tmp_path)
    assert comparison.agrees
    ratios = comparison.ratios(samples=20)
    assert all(ratio.point > 0 for ratio in ratios.values())
    tokens = {name: [turn.result.num_tokens for case in cases for turn in case] for name, cases in comparison.turns.items()}
    assert len(set(map(tuple, tokens.values()))) == 1
    assert len(tokens[name_of(OURS, ANSWERS)]) == 2

"""Drafting beside training: the same logits up to rounding, in every family; other ones from a wrong token, state or order."""

import pytest
import torch

from distill.dataset.batches import Example
from tests.support.tiny_heads import HEADS, misled, other_order, place_early, token_before
from train.preflight import largest_gap

DSPARK = {"kind": "dspark", "taps": [1, 2, 3], "block_size": 4, "mask_token_id": 0, "markov_rank": 4}
# Fewer passes than drafts: the last of them are not drafted as trained, and are left out.
XPRESS = {"kind": "xpress", "taps": [1, 2, 3], "block_size": 4, "mask_token_id": 0, "xpress_rank": 16, "num_jacobi_passes": 1}
WRONG = [
    *((kind, {"states": place_early}) for kind in HEADS),
    *((kind, {"tokens": token_before}) for kind in HEADS if kind != "medusa"),  # which reads no token
    *((kind, {"states": other_order}) for kind in HEADS if len(HEADS[kind].get("taps", ())) > 1),
]


@pytest.fixture(scope="module")
def bf16_target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, dtype=torch.bfloat16, layers=3).requires_grad_(False))


@pytest.fixture
def text(greedy_rows):
    return Example((*greedy_rows[5].prompt_ids, *greedy_rows[5].answer_ids[:8]), 6)


def stirred(task):
    """Return the task's head with all weights moved, so that none is 0 and everything it reads counts."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in task.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return task.module


@pytest.mark.parametrize(
    "head", [*HEADS.values(), DSPARK, XPRESS, HEADS["eagle3"] | {"draft_vocab_size": 20}], ids=lambda head: head["kind"]
)
def test_a_right_head_drafts_what_training_gives_it(head, head_task, text):
    task = head_task("dflash" if head in (DSPARK, XPRESS) else head["kind"], head=head)
    assert largest_gap(task, stirred(task), text, 3).size < 1e-5


@pytest.mark.parametrize("kind", HEADS)
def test_rounding_to_bfloat16_is_told_from_a_finding(kind, head_task, text, bf16_target):
    task = head_task(kind, target=bf16_target)
    head = stirred(task)
    rounding = largest_gap(task, head, text, 3)
    assert 1e-4 < rounding.size < rounding.tolerance / 3
    task.family = misled(task.family, states=place_early)
    assert largest_gap(task, head, text, 3).size > 2 * rounding.tolerance


@pytest.mark.parametrize(("kind", "wrong"), WRONG, ids=lambda value: next(iter(value)) if isinstance(value, dict) else value)
def test_a_wrong_token_state_or_order_is_no_rounding(kind, wrong, head_task, text):
    task = head_task(kind)
    task.family = misled(task.family, **wrong)
    gap = largest_gap(task, stirred(task), text, 3)
    assert gap.size > 0.1
    assert not gap.is_rounding


def test_what_goes_wrong_later_is_found_and_its_round_is_named(head_task, text):
    task = head_task("medusa")
    task.family = misled(task.family, states=place_early, from_commit=4)
    gap = largest_gap(task, stirred(task), text, 3)
    assert not gap.is_rounding
    assert gap.round > 4

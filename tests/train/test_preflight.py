"""The checks before a run: a right head passes, a head that drafts from something else does not, and nothing of it stays."""

import dataclasses
import logging

import pytest
import torch

from configs.runtime.errors import ConfigError, InputError
from distill.dataset.batches import ConversationDataset, Example
from heads.families.eagle3 import Eagle3
from heads.families.registry import FAMILIES
from tests.support.tiny_heads import HEADS, misled, other_order, place_early, token_before
from tests.support.training_runs import train_task
from train import preflight
from train.preflight import check_before_training, choose_text, largest_gap
from train.tasks import head as head_task_module

# One block of width 32 under a frozen output head cannot say six things: a Medusa block hardly lowers what it is given.
ABLE = {"medusa": {"train_head": True}}


def check(task, rows):
    check_before_training(task, ConversationDataset(rows, 64), task.held_out.accelerator)


def answered(monkeypatch, answers):
    """Let the target answer so, prompt by prompt."""
    remaining = iter(answers)
    monkeypatch.setattr(preflight, "written", lambda task, example, config: next(remaining))


@pytest.mark.parametrize("kind", HEADS)
def test_a_right_head_passes_and_one_line_says_what_was_seen(kind, head_task, greedy_rows, caplog, tmp_path):
    caplog.set_level(logging.INFO, "draftsmith")
    check(head_task(kind, head=ABLE.get(kind, {})), greedy_rows)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("sanity")]
    assert "the artifact reads back" in line
    block = 1 if kind == "early_exit" else 3  # as many drafts as depths are trained
    assert f"{block} of {block} drafts are accepted in a round" in line
    assert list((tmp_path / "run").iterdir()) == []


def test_drafting_from_a_wrong_state_is_found_out(head_task, greedy_rows, monkeypatch):
    monkeypatch.setitem(FAMILIES, "eagle3", misled(FAMILIES["eagle3"], states=place_early))
    with pytest.raises(RuntimeError, match=r"not explain \(draft [1-3] of "):
        check(head_task(sanity={"learning_rate": 1e-2, "overfit_steps": 20}), greedy_rows)


def test_labels_of_another_place_are_found_out(head_task, greedy_rows, monkeypatch):
    right = Eagle3.forward

    def moved(head, batch, states):
        last = batch.input_ids_BT.numel() - 1
        depths = right(head, batch, states)
        return [dataclasses.replace(depth, target_places_N=(depth.target_places_N + 1).clamp(max=last)) for depth in depths]

    monkeypatch.setattr(Eagle3, "forward", moved)
    task = head_task(sanity={"learning_rate": 1e-2, "overfit_steps": 100})
    with pytest.raises(InputError, match=r"[0-2] of 3 drafts are accepted .*does not learn"):
        check(task, greedy_rows)


def test_a_head_that_does_not_learn_is_told_apart(head_task, greedy_rows):
    task = head_task(sanity={"learning_rate": 1e-9, "overfit_steps": 3})
    with pytest.raises(InputError, match=r"after 3 steps .*does not learn a single conversation.*sanity\.overfit_steps"):
        check(task, greedy_rows)


@pytest.mark.parametrize(("kind", "name"), [("eagle3", "layers.0.self_attn.o_proj"), ("medusa", "blocks.0.layers.0")])
def test_an_artifact_that_loses_weights_is_found_out(kind, name, head_task, greedy_rows, monkeypatch):
    right = head_task_module.save_head

    def losing(folder, head, *args):
        torch.nn.init.zeros_(head.get_submodule(name).weight)
        right(folder, head, *args)

    monkeypatch.setattr(head_task_module, "save_head", losing)
    with pytest.raises(RuntimeError, match=f"the {kind} head drafts other tokens after it was written and loaded"):
        check(head_task(kind, head=ABLE.get(kind, {})), greedy_rows)


def test_without_anything_to_learn_the_run_is_refused(head_task, greedy_rows, monkeypatch):
    answered(monkeypatch, [[11], []] * 8)
    with pytest.raises(ConfigError, match=r"to none of its 16 shortest prompts .*sanity\.enabled"):
        check(head_task(), greedy_rows)


def test_the_text_ends_before_what_the_draft_cannot_say(head_task, greedy_rows, monkeypatch):
    task = head_task(head={"draft_vocab_size": 20})
    known = task.vocabulary.token_ids_W.tolist()
    unknown = next(token for token in range(64) if token not in known)
    answered(monkeypatch, [[unknown, *known[:8], unknown, known[9]]])
    text = choose_text(task, ConversationDataset(greedy_rows, 64))
    assert text.input_ids[text.answer_start :] == (unknown, *known[:8])


def test_training_is_the_same_to_the_bit_with_and_without_the_gates(head_task, greedy_rows, tmp_path):
    weights = []
    for enabled in (True, False):
        # Anchors are drawn from torch's own generator, whose state shows in the weights.
        task = head_task("dflash", head={"num_anchors": 4}, output=str(tmp_path / f"run-{enabled}"))
        if enabled:
            state = torch.get_rng_state()
            check(task, greedy_rows)
            assert torch.equal(torch.get_rng_state(), state)
        weights.append(train_task(task, greedy_rows)[0])
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


# --- parity -------------------------------------------------------------------------------------------------------

DSPARK = {"kind": "dspark", "taps": [1, 2, 3], "block_size": 4, "mask_token_id": 0, "markov_rank": 4}
# Fewer passes than drafts: the last of them are not drafted as trained, and are left out.
XPRESS = {"kind": "xpress", "taps": [1, 2, 3], "block_size": 4, "mask_token_id": 0, "xpress_rank": 16, "num_jacobi_passes": 1}
WRONG = [
    *((kind, {"states": place_early}) for kind in HEADS),
    *((kind, {"tokens": token_before}) for kind in ("eagle3", "dflash")),
    ("eagle3", {"states": other_order}),
]


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


def test_rounding_to_bfloat16_is_told_from_a_finding(head_task, text, tiny_llama, as_target):
    target = as_target(tiny_llama(seed=1, dtype=torch.bfloat16, layers=3).requires_grad_(False))
    for kind in ("eagle3", "medusa", "dflash"):
        task = head_task(kind, target=target)
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
    assert gap.size > max(0.1, gap.tolerance)

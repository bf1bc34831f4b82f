"""Rows that the draft writes: how many and which, what is written, and what are the labels."""

from collections import Counter

import pytest
import torch

from configs.schema.training import DistillConfig
from distill.dataset.batches import Example, collate
from distill.student.on_policy import Rewriter, RowSelection, examples_of
from heads.proposers.draft_lm import DraftLM

EXAMPLES = [  # the last one has a prompt of one token
    Example((7, 12, 3, 20, 21, 22, 23, 24, 25), 3, 4),
    Example((9, 9, 31, 5, 6, *range(10, 55)), 5, 0),
    Example((40, 41, 42), 2, 2),
    Example((11, 12, 13, 11), 1, 9),
]


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


@pytest.fixture(scope="module")
def draft(tiny_llama):
    return DraftLM(tiny_llama(seed=2), 64)


@pytest.fixture
def rewriter(target):
    """A function that makes the rewriter of a run."""

    def make(on_policy=None, seed=0, target=target, **settings):
        values = {
            "policy": {"on_policy": on_policy, **settings},
            "schedule": {"seed": seed},
        }
        return Rewriter(DistillConfig.model_validate(values), target)

    return make


def choose(rewriter, step=0, micro_batch=0, batch_size=8):
    return rewriter.choose(batch_size, step=step, micro_batch=micro_batch)


def chosen(*rows, key="0/0/0"):
    return RowSelection(rows=rows, key=key)


def naive_greedy(draft, ids, num_tokens):
    """Continue one row without a cache."""
    ids = list(ids)
    for _ in range(num_tokens):
        ids.append(int(draft.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids)


# --- which rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_the_numbers_of_rows_have_the_share_as_their_mean_and_vary_by_less_than_two(rewriter, share):
    policy, num_steps = rewriter(share), 2000
    choices = [choose(policy, step).rows for step in range(num_steps)]
    counts = [len(rows) for rows in choices]
    assert sum(counts) / num_steps == pytest.approx(8 * share, abs=0.03)
    assert max(counts) - min(counts) <= 1
    places, mean = Counter(row for rows in choices for row in rows), num_steps * share
    assert all(abs(places[row] - mean) <= 5 * mean**0.5 for row in range(8))
    assert all(len(set(rows)) == len(rows) for rows in choices)


def test_a_choice_depends_on_seed_step_and_micro_batch_alone(rewriter):
    places = [(step, micro_batch) for step in range(20) for micro_batch in range(2)]
    first = [choose(rewriter(0.4), *place) for place in places]
    assert [choose(rewriter(0.4), *place) for place in reversed(places)] == first[::-1]
    assert len({choice.rows for choice in first}) > 20
    assert [choose(rewriter(0.4, seed=1), *place) for place in places] != first


# --- what is written ----------------------------------------------------------------------------------------------


def test_greedy_rows_are_the_drafts_own_continuations_of_their_prompts(rewriter, draft):
    batch, num_written = rewriter(temperature=0.0).rewrite(collate(EXAMPLES), chosen(1, 3), draft)
    anew, untouched, short = (examples_of(batch)[row] for row in (1, 2, 3))
    # 45 tokens: three proposals; the answers keep their lengths.
    assert anew.input_ids == naive_greedy(draft, EXAMPLES[1].input_ids[:5], 45)
    assert short.input_ids == naive_greedy(draft, EXAMPLES[3].input_ids[:1], 3)
    assert untouched == EXAMPLES[2]
    assert num_written == 45 + 3


def test_of_several_answers_one_is_the_drafts_and_those_before_stay_labels(rewriter, draft):
    chat, lengths = Example(tuple(range(7, 27)), 15, 0, None, ((3, 6), (8, 12))), Counter[int]()
    for step in range(30):
        batch, _ = rewriter(temperature=0.0).rewrite(collate([chat]), chosen(0, key=f"0/{step}/0"), draft)
        (found,) = examples_of(batch)
        number = len(found.earlier)
        assert found.earlier == chat.earlier[:number]
        assert found.spans[-1] == chat.spans[number]
        assert found.input_ids == naive_greedy(
            draft, chat.input_ids[: found.answer_start], len(found.input_ids) - found.answer_start
        )
        lengths[number] += 1
    assert min(lengths[number] for number in range(3)) >= 4


def test_a_row_ends_with_the_first_token_that_ends_a_text_and_its_neighbours_go_on(rewriter, draft, target, as_target):
    whole = naive_greedy(draft, EXAMPLES[1].input_ids[:5], 45)
    neighbour = naive_greedy(draft, EXAMPLES[0].input_ids[:3], 6)
    end = next(token for token in whole[25:] if token not in whole[5:25] and token not in neighbour)
    for row, start in ((1, 5), (0, 3)):
        assert end not in EXAMPLES[row].input_ids[:start]
    policy = rewriter(temperature=0.0, target=as_target(target.model, eos=(end,)))
    batch, num_written = policy.rewrite(collate(EXAMPLES), chosen(0, 1), draft)
    ended, other = examples_of(batch)[1], examples_of(batch)[0]
    assert ended.input_ids == whole[: whole.index(end) + 1]
    assert other.input_ids == neighbour
    assert num_written == len(ended.input_ids) - 5 + 6
    assert batch.loss_mask_BT[1, : len(ended.input_ids)].tolist() == [place >= 5 for place in range(len(ended.input_ids))]


@pytest.mark.parametrize("place", [0, 10])
def test_an_answer_ends_before_a_token_that_stands_for_an_image_and_an_empty_one_is_none(
    rewriter, draft, tiny_llama, as_target, place
):
    prompt, whole = EXAMPLES[1].input_ids[:5], naive_greedy(draft, EXAMPLES[1].input_ids[:5], 45)
    target = as_target(tiny_llama(seed=1))
    target.runner.placeholder = whole[5 + place]
    first = whole.index(target.runner.placeholder, 5)
    batch, num_written = rewriter(temperature=0.0, target=target).rewrite(collate(EXAMPLES), chosen(1), draft)
    assert examples_of(batch)[1].input_ids == (whole[:first] if first > 5 else EXAMPLES[1].input_ids)
    assert num_written == first - len(prompt)


def test_draws_belong_to_a_conversation_in_a_micro_batch_of_a_run(rewriter, draft):
    def written(examples, row, key="0/0/0", seed=0):
        return examples_of(rewriter(seed=seed).rewrite(collate(examples), chosen(row, key=key), draft)[0])[row].input_ids

    alone = written([EXAMPLES[1]], 0)
    assert written(EXAMPLES, 1) == alone  # whatever its neighbours
    others = [
        written([EXAMPLES[1]], 0, key="0/1/0"),
        written([EXAMPLES[1]], 0, key="0/0/1"),
        written([EXAMPLES[1]._replace(conversation=1)], 0),
        written([EXAMPLES[1]], 0, seed=1),
    ]
    assert len({alone, *others}) == 5

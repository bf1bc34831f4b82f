"""The draft vocabulary is made of what the target answers with or might have, and of what ends an answer."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch

from configs.runtime.errors import ConfigError
from distill.dataset.batches import ConversationDataset
from distill.student.vocabulary import choose_by_mass, log_choice, most_frequent_answer_tokens, target_mass
from tests.support.caches import conversation, random_conversations
from tests.support.losses import target_hidden


@pytest.fixture
def target(tiny_llama, as_target):
    return as_target(tiny_llama(layers=1), eos=(1, 2))


ROWS = [conversation((50, 50, 50, 50), (40, 9, 9, 33)), conversation((51,), (40, 9, 33, 20, 12))]


def test_the_most_frequent_answer_tokens_are_taken_and_ties_go_to_the_lower_id(target, caplog):
    with caplog.at_level(logging.INFO, logger="draftsmith"):
        chosen = most_frequent_answer_tokens(ROWS, 6, target)
    # 9 comes three times, 33 and 40 twice; of 12 and 20, once each, one fits. Prompt tokens do not count; 1 and 2 end answers.
    assert chosen.token_ids_W.tolist() == [1, 2, 9, 12, 33, 40]
    assert chosen.target_vocab_size == 64
    assert "6 of 64 tokens, 88.89 %" in caplog.text


@pytest.mark.parametrize("size", [1, 65])
def test_a_size_that_cannot_be_is_refused_with_what_can(target, size):
    with pytest.raises(ConfigError, match=rf"^draft_vocab_size: expected 2 .* to 64 .*, got {size}"):
        most_frequent_answer_tokens(ROWS, size, target)


# --- by mass ------------------------------------------------------------------------------------------------------


def rows_of_two_kinds():
    lengths = [(4, 9), (11, 3), (2, 1), (6, 30), (5, 12), (3, 40), (8, 2), (7, 7), (9, 5), (2, 22), (6, 6)]
    rows = random_conversations(lengths, 64, seed=0)
    return [replace(row, category=("code", "chat")[number % 2]) for number, row in enumerate(rows)]


def test_mass_is_the_sum_of_the_targets_probabilities_before_answer_tokens(target):
    rows, max_length = rows_of_two_kinds(), 35
    naive = {"chat": torch.zeros(64, dtype=torch.float64), "code": torch.zeros(64, dtype=torch.float64)}
    for row in rows:
        ids = (row.prompt_ids + row.answer_ids)[:max_length]
        p_TV = target.model(torch.tensor([ids])).logits[0].detach().double().softmax(-1)
        for position in range(len(row.prompt_ids), len(ids)):
            naive[row.category] += p_TV[position - 1]
    dataset = ConversationDataset(rows, max_length)
    mass = target_mass(target, dataset, range(len(rows)), partial(target_hidden, target))
    assert list(mass) == ["chat", "code"]
    for kind, mass_V in mass.items():
        torch.testing.assert_close(mass_V, naive[kind], rtol=1e-9, atol=1e-12)


def falling_mass(share):
    """Return mass of which token number k has `share` times as much as the one before it."""
    return {"chat": share ** torch.arange(64, dtype=torch.float64)}


def test_without_a_size_as_many_tokens_are_taken_as_decode_fastest(tiny_llama, as_target, caplog):
    measured = {"chat": falling_mass(0.7)["chat"], "other": falling_mass(0.7)["chat"].flip(0) * 1e-3}
    total_V, sizes = sum(measured.values()), {}
    for layers in (2, 12):
        target = as_target(tiny_llama(layers=layers), eos=(1, 2))
        model, best = target.model, None
        read = sum(each.numel() for each in model.parameters()) - model.get_input_embeddings().weight.numel()
        for size in range(65):
            alpha = 0.5 * float(total_V[:size].sum() / total_V.sum())
            expected = (1 + alpha + alpha**2 + alpha**3) / (1 + 3 * (1 / layers + size * model.config.hidden_size / read))
            best = max(best or (0, 0), (expected, size), key=lambda each: each[0])
        choice = choose_by_mass(falling_mass(0.7), measured, None, target, 3)
        assert choice.vocabulary.token_ids_W.tolist() == list(range(best[1]))
        sizes[layers] = best[1]
    assert sizes[12] > sizes[2]  # a row of the head counts less beside a larger target
    assert choice.report["uncovered_mass"] == pytest.approx(1 - float(total_V[: sizes[12]].sum() / total_V.sum()))
    assert choice.report["uncovered_mass_by_kind"]["other"] > 0.9
    with caplog.at_level(logging.INFO, logger="draftsmith"):
        log_choice(choice.report)
    assert "leaves out" in caplog.text
    assert "most: other" in caplog.text


def test_a_vocabulary_of_half_the_tokens_or_more_is_taken_whole(tiny_llama, as_target, caplog):
    target = as_target(tiny_llama(layers=12), eos=(1, 2))
    flat = falling_mass(1.0)
    choice = choose_by_mass(flat, flat, None, target, 3)
    assert (choice.vocabulary, choice.report["size"], choice.report["uncovered_mass"]) == (None, 64, 0.0)
    log_choice(choice.report)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_given_size_is_kept_and_tokens_that_end_an_answer_are_in_it(target):
    choice = choose_by_mass({"chat": falling_mass(0.7)["chat"].flip(0)}, falling_mass(0.7), 5, target, 3)
    assert choice.vocabulary.token_ids_W.tolist() == [1, 2, 61, 62, 63]

"""Acceptance metrics: against counting by hand, and against their identities."""

import math
from dataclasses import replace
from itertools import accumulate
from operator import mul

import pytest

from eval.metrics.acceptance import RoundAcceptance, summarise_acceptance
from eval.metrics.round_table import tabulate


def measured(generations, num_positions=3):
    return summarise_acceptance(generations, num_positions, samples=20, seed=0)


def test_every_number_equals_counting_in_plain_python(random_generations):
    fields = measured(random_generations)

    rounds = [round_ for generation in random_generations for round_ in generation.rounds]
    accepted = [round_.num_accepted for round_ in rounds]
    committed = sum(len(round_.committed) for round_ in rounds)
    assert fields["num_tokens"] == committed
    assert fields["num_rounds"] == len(rounds)
    assert fields["tokens_per_target_step"] == committed / len(rounds)
    assert fields["accepted_per_round"] == sum(accepted) / len(rounds)
    assert fields["draft_token_yield"] == sum(accepted) / sum(len(round_.drafted) for round_ in rounds)
    assert fields["accepted_histogram"] == [accepted.count(length) for length in range(4)]
    assert fields["drafted_histogram"] == [0, 0, 0, len(rounds)]
    own = [sum(len(r.committed) for r in g.rounds) / len(g.rounds) for g in random_generations]
    assert fields["tokens_per_target_step_macro"] == pytest.approx(sum(own) / len(own))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_acceptance_by_position_equals_counting_in_plain_python(random_generations, position):
    fields = measured(random_generations)

    judged = [
        round_
        for generation in random_generations
        for round_ in generation.rounds
        if len(round_.committed) > round_.num_accepted or round_.num_accepted > position
    ]
    passed = sum(round_.num_accepted > position for round_ in judged)
    reached = sum(round_.num_accepted >= position for round_ in judged)
    assert fields["position_survival"][position] == passed / len(judged)
    assert fields["position_conditional"][position] == passed / reached


def test_overlap_is_averaged_where_it_was_recorded(make_round, make_generation):
    rounds = [make_round(3, 1, overlap=(0.9, 0.5)), make_round(3, 0, overlap=(0.1,)), make_round(3, 3)]

    fields = measured([make_generation(rounds)])

    assert fields["overlap_alpha_by_position"] == [0.5, 0.5, None]
    assert fields["overlap_alpha"] == pytest.approx(1.5 / 3)


def test_numbers_of_rounds_that_drafted_fully_and_were_not_cut_keep_their_identities(make_round, make_generation):
    fields = measured([make_generation([make_round(3, accepted) for accepted in (0, 1, 3, 2, 0, 3)])])

    assert fields["tokens_per_target_step"] == pytest.approx(fields["accepted_per_round"] + 1)
    assert fields["position_survival"] == pytest.approx(list(accumulate(fields["position_conditional"], mul)))
    assert sum(fields["position_survival"]) == pytest.approx(fields["accepted_per_round"])


def test_plain_decoding_yields_exactly_one_token_a_step(make_round, make_generation):
    fields = measured([make_generation([make_round(0, 0)] * 5)])

    assert fields["tokens_per_target_step"] == 1.0
    assert fields["draft_token_yield"] is None
    assert fields["position_conditional"] == [None, None, None]


def test_drafts_behind_an_accepted_end_of_text_count_as_drafted_but_not_as_refused(make_round, make_generation):
    fields = measured([make_generation([make_round(3, 3), make_round(3, 1, cut=True)])])

    assert fields["position_conditional"] == [1.0, 1.0, 1.0]
    assert fields["draft_token_yield"] == 4 / 6
    assert fields["tokens_per_target_step"] == 5 / 2


def test_rounds_too_short_for_a_position_do_not_speak_about_it(make_round, make_generation):
    fields = measured([make_generation([make_round(3, 2), make_round(1, 1), make_round(2, 0)])])

    assert fields["position_survival"] == [2 / 3, 1 / 2, 0.0]
    assert fields["position_conditional"] == [2 / 3, 1.0, 0.0]
    assert fields["drafted_histogram"] == [0, 1, 1, 1]


def test_pooled_weighs_rounds_and_macro_weighs_prompts_with_all_their_turns(make_round, make_generation):
    first, second = make_generation([make_round(3, 0)] * 9), make_generation([make_round(3, 3)])
    other = make_generation([make_round(3, 1)], prompt_id="writing-2")

    fields = measured([first, replace(second, turn=1), other])

    assert fields["tokens_per_target_step"] == 15 / 11
    assert fields["tokens_per_target_step_macro"] == (13 / 10 + 2) / 2


def test_nothing_measured_gives_none_and_never_nan():
    fields = measured([])

    assert fields["tokens_per_target_step"] is fields["overlap_alpha"] is fields["accepted_per_round"] is None
    assert not any(isinstance(value, float) and math.isnan(value) for value in fields.values())


def test_a_round_longer_than_announced_is_a_mistake_of_the_caller(make_round, make_generation):
    with pytest.raises(ValueError, match="drafted 4 tokens, more than num_positions=3"):
        RoundAcceptance(3).update(tabulate([make_generation([make_round(4, 0)])]))


def test_the_yield_of_trees_and_its_interval_count_every_node_that_was_judged(random_generations):
    trees = [replace(each, rounds=tuple(replace(round_, num_nodes=9) for round_ in each.rounds)) for each in random_generations]
    found = summarise_acceptance(trees, 3, samples=200, seed=0)

    low, high = found["draft_token_yield_ci"]
    assert low <= found["draft_token_yield"] <= high
    assert found["draft_token_yield"] == found["accepted_per_round"] / 9

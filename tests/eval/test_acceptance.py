"""Acceptance against counting by hand and its identities; agreement of the distributions against plain loops."""

import math
from dataclasses import replace

import pytest

from eval.acceptance import Acceptance, Tally
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE
from eval.stats import ratio_interval


def measured(generations, num_positions=3):
    return Acceptance(num_positions, generations).summarise()


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
    for position in range(3):
        judged = [each for each in rounds if len(each.committed) > each.num_accepted or each.num_accepted > position]
        passed = sum(round_.num_accepted > position for round_ in judged)
        reached = sum(round_.num_accepted >= position for round_ in judged)
        assert fields["position_survival"][position] == passed / len(judged)
        assert fields["position_conditional"][position] == passed / reached


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


def test_nothing_drafted_and_nothing_measured_give_none_and_never_nan(make_round, make_generation):
    plain, nothing = measured([make_generation([make_round(0, 0)] * 5)]), measured([])
    assert (plain["tokens_per_target_step"], plain["draft_token_yield"]) == (1.0, None)
    assert nothing["tokens_per_target_step"] is nothing["overlap_alpha"] is plain["position_conditional"][0] is None
    assert not any(isinstance(value, float) and math.isnan(value) for value in nothing.values())


def test_a_round_longer_than_announced_is_a_mistake_of_the_caller(make_round, make_generation):
    with pytest.raises(ValueError, match="drafted 4 tokens, more than 3"):
        measured([make_generation([make_round(4, 0)])])


def test_the_yield_of_trees_and_its_interval_count_every_node_that_was_judged(random_generations):
    trees = [replace(each, rounds=tuple(replace(round_, num_nodes=9) for round_ in each.rounds)) for each in random_generations]
    found = measured(trees)
    low, high = found["draft_token_yield_ci"]
    assert low <= found["draft_token_yield"] <= high
    assert found["draft_token_yield"] == found["accepted_per_round"] / 9


# --- distributions ------------------------------------------------------------------------------------------------


def test_every_interval_is_of_the_sums_by_prompt_that_its_number_divides(random_generations):
    fields = measured(random_generations)
    by_prompt = [each.rounds for each in sorted(random_generations, key=lambda each: each.prompt_id)]

    def sums(value_of):
        return [sum(value_of(round_) for round_ in rounds) for rounds in by_prompt]

    accepted, num_rounds = sums(lambda round_: round_.num_accepted), sums(lambda _: 1)
    compared = sums(lambda round_: len(round_.overlap or ()))
    columns = {
        "tokens_per_target_step": (sums(lambda round_: len(round_.committed)), num_rounds),
        "accepted_per_round": (accepted, num_rounds),
        "draft_token_yield": (accepted, sums(lambda round_: len(round_.drafted))),
        "overlap_alpha": (sums(lambda round_: sum(round_.overlap or ())), compared),
        "uncovered_mass": (sums(lambda round_: sum(round_.uncovered or ())), compared),
    }
    for name, (above, below) in columns.items():
        assert fields[name] == pytest.approx(sum(above) / sum(below), rel=1e-12)
        assert fields[f"{name}_ci"] == pytest.approx(ratio_interval(above, below).bounds, rel=1e-12)
    second = [round_.overlap[1] for rounds in by_prompt for round_ in rounds if len(round_.overlap or ()) > 1]
    assert fields["overlap_alpha_by_position"][1] == pytest.approx(sum(second) / len(second))


# --- a tally --------------------------------------------------------------------------------------------------------


def tallied(generations, timings=()):
    tally = Tally(3)
    tally.add(generations, timings)
    return tally


def test_a_prompt_counts_when_every_turn_was_answered_in_every_mode(make_round, make_generation):
    def answer(prompt_id, turn, mode, stop_reason="length"):
        return replace(make_generation([make_round(3, 1)], prompt_id=prompt_id, mode=mode), turn=turn, stop_reason=stop_reason)

    modes = (AUTOREGRESSIVE, SPECULATIVE)
    generations = [answer(name, turn, mode) for name in ("whole", "failed") for turn in (0, 1) for mode in modes]
    generations[-1] = answer("failed", 1, SPECULATIVE, "error")
    generations += [answer("half", 0, mode) for mode in modes] + [answer("one-sided", 0, SPECULATIVE)]
    tally = tallied(generations)

    asked = [(name, turn) for name in ("whole", "failed", "half", "never") for turn in (0, 1)] + [("one-sided", 0)]
    assert tally.answered(asked) == {"whole"}
    assert [(each.prompt_id, each.turn, each.mode) for each in tally.failed] == [("failed", 1, SPECULATIVE)]

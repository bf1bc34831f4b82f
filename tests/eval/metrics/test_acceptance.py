"""Acceptance against counting by hand and its identities; agreement of the distributions against plain loops."""

import math
from dataclasses import replace

import pytest

from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE
from eval.metrics.acceptance import Acceptance, Tally
from eval.report.samples import pick_samples
from eval.stats import ratio_interval
from tests.support.reports import numbers_of, report_of


def measured(generations, num_positions=3):
    return Acceptance(num_positions, generations).summarise(samples=20, seed=0)


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


def test_rounds_count_by_how_many_tokens_stand_before_them(make_round, make_generation):
    """The answer's first token is the prefill's: after a prompt of 15 tokens the first round begins at 16."""
    # By prompt: its length, and what its rounds accept; each commits one more. Rounds begin at
    # 3, 7, 11, 15 and 19; at 16 and 17; at 17, 21, 25, 29 and 33; at 32.
    texts = [(2, [3, 3, 3, 3, 3]), (15, [0, 1]), (16, [3, 3, 3, 3, 2]), (31, [1])]
    generations = [
        make_generation([make_round(3, each) for each in accepted], prompt_id=f"p{length}", prompt_tokens=(7,) * length)
        for length, accepted in texts
    ]
    parts = Acceptance(3, generations).by_context(samples=20, seed=0)
    ends = [(part["from_tokens"], part["to_tokens"]) for part in parts]
    counts = [(part["num_prompts"], part["num_rounds"], part["tokens_per_target_step"]) for part in parts]
    assert ends == [(0, 16), (16, 32), (32, 64)]
    assert counts == [(1, 4, 16 / 4), (3, 1 + 2 + 4, (4 + 3 + 16) / 7), (2, 1 + 1, (3 + 2) / 2)]
    intervals = [
        None,
        *(ratio_interval(*each, samples=20, seed=0).bounds for each in (([3, 16, 4], [2, 4, 1]), ([3, 2], [1, 1]))),
    ]
    assert [part["tokens_per_target_step_ci"] for part in parts] == intervals


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
    """Every fourth round has an overlap and nothing else of the comparison."""
    generations = [
        replace(
            each, rounds=tuple(replace(one, distributions=None) if n % 4 == 0 else one for n, one in enumerate(each.rounds))
        )
        for each in random_generations
    ]
    fields = measured(generations)
    by_prompt = [each.rounds for each in sorted(generations, key=lambda each: each.prompt_id)]

    def sums(value_of):
        return [sum(value_of(round_) for round_ in rounds) for rounds in by_prompt]

    def all_of(name):
        return sums(lambda round_: sum(getattr(round_.distributions, name, ())))

    accepted, num_rounds = sums(lambda round_: round_.num_accepted), sums(lambda _: 1)
    compared = sums(lambda round_: len(getattr(round_.distributions, "kl", ())))
    columns = {
        "tokens_per_target_step": (sums(lambda round_: len(round_.committed)), num_rounds),
        "accepted_per_round": (accepted, num_rounds),
        "draft_token_yield": (accepted, sums(lambda round_: len(round_.drafted))),
        "overlap_alpha": (sums(lambda round_: sum(round_.overlap or ())), sums(lambda round_: len(round_.overlap or ()))),
        "top1_agreement": (all_of("agrees"), compared),
        "kl_divergence": (all_of("kl"), compared),
        "uncovered_mass": (all_of("uncovered"), compared),
    }
    for name, (above, below) in columns.items():
        assert fields[name] == pytest.approx(sum(above) / sum(below), rel=1e-12)
        assert fields[f"{name}_ci"] == pytest.approx(ratio_interval(above, below, samples=20, seed=0).bounds, rel=1e-12)
    second = [round_.overlap[1] for rounds in by_prompt for round_ in rounds if len(round_.overlap or ()) > 1]
    assert fields["overlap_alpha_by_position"][1] == pytest.approx(sum(second) / len(second))


# --- a tally --------------------------------------------------------------------------------------------------------


def tallied(generations, timings=()):
    tally = Tally(3)
    tally.add(generations, timings)
    return tally


def shares_of(generations, timings, count):
    """Cut a run into the tallies of several processes, prompts in turns."""
    ids = list(dict.fromkeys(each.prompt_id for each in generations))
    shares = []
    for rank in range(count):
        own = set(ids[rank::count])
        share = Tally(3)
        for prompt_id in ids[rank::count]:
            share.add([each for each in generations if each.prompt_id == prompt_id])
        share.timings = [each for each in timings if own.issuperset(each.prompt_ids)]
        shares.append(share)
    return shares


@pytest.mark.parametrize("count", [3, 40])
def test_any_number_of_processes_reports_what_one_does(report_inputs, count):
    generations, timings = report_inputs["generations"], report_inputs["timings"]
    alone = tallied(generations, timings)
    together, *others = shares_of(generations, timings, count)
    for other in others:
        together.merge(other)
    for tally in (alone, together):
        tally.sort(report_inputs["prompts"].ids)

    reports = [report_of({**report_inputs, "records": tally}) for tally in (alone, together)]
    reports = [report.to_dict() for report in reports]

    assert list(reports[0]["by_category"]) == list(reports[1]["by_category"])
    for section in ("prompts", "speed", "by_category", "baselines", "samples", "acceptance"):
        numbers = [dict(numbers_of(each[section])) for each in reports]
        assert numbers[1] == pytest.approx(numbers[0]), section


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


def test_the_samples_are_those_that_all_answers_would_give(random_generations):
    texts = {(each.prompt_id, 0): "" for each in random_generations}
    expected = pick_samples(random_generations, texts, str, 3)
    for order in (random_generations, random_generations[::-1]):
        tally = Tally(3)
        for each in order:
            tally.add([each])
        found = pick_samples(tally.samples, texts, str, 3)
        for side in ("worst", "best"):
            rates = [[sample["tokens_per_target_step"] for sample in one[side]] for one in (found, expected)]
            assert rates[0] == rates[1]
        assert len(tally.samples) == 6

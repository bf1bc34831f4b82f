"""A tally counts what a list of all generations would, in any split over processes, in little memory and time."""

from dataclasses import replace

import pytest

from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE
from eval.metrics.acceptance import Tally
from eval.report.samples import pick_samples
from tests.support.reports import report_of


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
        assert flat(reports[1][section]) == pytest.approx(flat(reports[0][section])), section


def flat(value, path=""):
    """Return every leaf of nested dicts and lists by its path."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, child in items for name, leaf in flat(child, f"{path}.{key}").items()}
    return {path: value}


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

"""What a sweep's counts come to: rows with intervals paired by prompt, and the recipe to take."""

import json
from statistics import NormalDist

import numpy as np
import pytest

from configs.runtime.errors import InputError
from eval.stats import bootstrap as intervals
from scripts.lab.bench.harness import SEED
from scripts.lab.recipe_sweep.results import CellResult, choose, make_rows, mean_tau_ratio, read_rows


def result(name, *counts, seconds=1.0):
    return CellResult(
        divergence=name,
        data_policy="own",
        counts=dict(zip((0.0, 1.0), counts, strict=False)),
        training_seconds=seconds,
        labels=7,
    )


FIRST = result("first", [(10, 5), (30, 10), (8, 8), (12, 6)], [(9, 6), (20, 10), (8, 7), (10, 8)])
OTHER = result("other", [(10, 4), (30, 12), (8, 5), (12, 5)], [(9, 5), (20, 9), (8, 8), (10, 6)])


@pytest.fixture
def plain_percentiles(monkeypatch):
    """Takes the widening for few prompts out, so that bounds are those of the bare resamples."""

    def quantile(probability, degrees):
        return NormalDist().inv_cdf(probability) * np.sqrt(degrees / (degrees + 1))

    monkeypatch.setattr(intervals, "student_quantile", quantile)


def naive_tau(cell, temperature, prompts):
    counts = [cell.counts[temperature][prompt] for prompt in prompts]
    return sum(committed for committed, _ in counts) / sum(rounds for _, rounds in counts)


def naive_mean_tau(cell, prompts):
    return (naive_tau(cell, 0.0, prompts) + naive_tau(cell, 1.0, prompts)) / 2


def test_rows_hold_pooled_tau_and_ratios_paired_by_prompt(plain_percentiles):
    first, other, last = make_rows([FIRST, OTHER], result("undistilled", *OTHER.counts.values()), samples=60)
    assert first["tau_t0"] == 60 / 29
    assert other["tau_t1"] == 47 / 28
    assert other["tau_t0_vs_first"] == pytest.approx((60 / 26) / (60 / 29))
    assert (first["tau_t1_vs_first"], first["tau_t1_vs_first_low"], first["tau_t1_vs_first_high"]) == (1.0, 1.0, 1.0)
    assert last["divergence"] == "undistilled"
    assert last.keys() == first.keys()
    drawn = np.random.default_rng(SEED).integers(4, size=(60, 4))
    ratios = [naive_tau(OTHER, 0.0, prompts) / naive_tau(FIRST, 0.0, prompts) for prompts in drawn]
    bounds = [other["tau_t0_vs_first_low"], other["tau_t0_vs_first_high"]]
    assert bounds == pytest.approx(np.quantile(ratios, [0.025, 0.975]))


def test_means_over_temperatures_are_compared_on_the_same_drawn_prompts(plain_percentiles):
    interval = mean_tau_ratio(OTHER, FIRST, samples=60, level=0.9)
    everyone = range(4)
    assert OTHER.mean_tau == naive_mean_tau(OTHER, everyone)
    assert interval.point == pytest.approx(naive_mean_tau(OTHER, everyone) / naive_mean_tau(FIRST, everyone))
    drawn = np.random.default_rng(SEED).integers(4, size=(60, 4))
    ratios = [naive_mean_tau(OTHER, prompts) / naive_mean_tau(FIRST, prompts) for prompts in drawn]
    assert interval.bounds == pytest.approx(np.quantile(ratios, [0.05, 0.95]))


def noisy(name, factor, spread, seed):
    """A cell whose prompts yield `factor` times 2 tokens a round, give or take a share of `spread`."""
    generator = np.random.default_rng(seed)
    counts = [[(round(2000 * factor * (1 + spread * generator.standard_normal())), 1000) for _ in range(30)] for _ in range(2)]
    return result(name, *counts)


def test_the_winner_has_the_highest_mean_of_those_better_beyond_noise():
    first = noisy("first", 1.0, 0.01, 0)
    good, best, worse = noisy("good", 1.1, 0.01, 1), noisy("best", 1.2, 0.01, 2), noisy("worse", 0.9, 0.01, 3)
    verdict = choose([first, good, best, worse], samples=500)
    assert verdict.winner is best
    assert verdict.beyond_noise
    assert verdict.sentence.startswith("Take best on own: its mean tau is 2.4")
    assert verdict.sentence.endswith("which excludes 1 (at 98.33 %, for 3 comparisons).")
    assert verdict.comparisons.keys() == {"good on own", "best on own", "worse on own"}
    assert verdict.comparisons["best on own"]["mean_tau"] == best.mean_tau


def test_a_lead_within_noise_or_none_at_all_keeps_the_first():
    first, lucky, worse = noisy("first", 1.0, 0.3, 0), noisy("lucky", 1.1, 0.3, 1), noisy("worse", 0.9, 0.01, 1)
    assert lucky.mean_tau > first.mean_tau
    verdict = choose([first, lucky], samples=500)
    assert verdict.winner is first
    assert not verdict.beyond_noise
    assert verdict.level == pytest.approx(0.95)
    assert verdict.sentence.startswith("No cell is better than the first beyond noise: keep the simplest, first on own. ")
    assert "The highest mean tau is that of lucky on own" in verdict.sentence
    assert choose([first, worse], samples=50).sentence.startswith("The first cell, first on own, has the highest mean tau, ")
    assert choose([first], samples=50).sentence == "first on own is the only cell; there is nothing to choose from."


def test_a_file_that_is_no_sweeps_is_refused(tmp_path):
    path = tmp_path / "distill.json"
    path.write_text(json.dumps({"rows": [{"loss": "chunked"}]}))
    with pytest.raises(InputError, match="does not hold the rows of a sweep"):
        read_rows(path)
    with pytest.raises(InputError, match="not found"):
        read_rows(tmp_path / "nosuch.json")

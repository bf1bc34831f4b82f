"""The curve of tau by answer tokens: planted laws are found within the intervals, and a law that breaks is said to be off."""

import numpy as np
import pytest

from scripts.lab.curve_fit import fit_curve

MOST, FACTOR, EXPONENT = 6, 12.0, 0.15


def counts_of(tau, num_prompts, generator):
    """Committed tokens and rounds of prompts whose own taus lie around a mean."""
    rounds = generator.integers(20, 40, num_prompts)
    own = tau + 0.1 * generator.standard_normal(num_prompts)
    return [(round(float(count * each)), int(count)) for count, each in zip(rounds, own, strict=True)]


def law(tokens):
    return MOST - FACTOR * tokens**-EXPONENT


def test_planted_power_laws_are_recovered_within_their_intervals_and_checked():
    sizes, held = [4_000, 8_000, 16_000, 32_000], np.zeros(4, dtype=int)
    for seed in range(100, 140):
        generator = np.random.default_rng(seed)
        curve = fit_curve(
            {size: counts_of(law(size), 64, generator) for size in sizes}, MOST, sizes=[64_000, 512_000], samples=200
        )
        assert curve.check.tokens == 32_000
        assert curve.exponent.high - curve.exponent.low < 0.05
        held += [
            curve.exponent.low < EXPONENT < curve.exponent.high,
            all(tau.low < law(tokens) < tau.high for tokens, tau in curve.predicted.items()),
            curve.check.predicted.low < law(32_000) < curve.check.predicted.high,
            curve.check.holds,
        ]
    assert list(curve.predicted) == [64_000, 512_000]
    assert (held >= 34).all(), held  # of 40, at 95 %


def test_without_noise_the_fit_is_the_law_itself():
    counts = {size: [(round(1e6 * law(size)), 1_000_000)] * 3 for size in (1_000, 2_000)}
    curve = fit_curve(counts, MOST, sizes=[4_000], samples=20)
    assert curve.check is None
    assert curve.exponent.point == pytest.approx(EXPONENT, abs=1e-4)
    assert curve.predicted[4_000].point == pytest.approx(law(4_000), abs=1e-4)


def test_a_law_that_breaks_is_off():
    generator = np.random.default_rng(1)
    taus = {1_000: law(1_000), 2_000: law(2_000), 4_000: law(2_000)}  # learning ended
    curve = fit_curve({size: counts_of(tau, 64, generator) for size, tau in taus.items()}, MOST, sizes=[], samples=400)
    assert not curve.check.holds
    assert curve.check.difference.high < 0

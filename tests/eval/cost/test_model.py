"""The cost model: predicted speedups against rounds played out with known costs, and the fit of a round's parts."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from eval.cost.model import (
    AcceptanceProfile,
    CostModel,
    MeasuredCosts,
    RooflineCosts,
    Surface,
    answer_lengths,
    expected_rounds,
    forward_terms,
)
from eval.cost.predict import predictions
from eval.report.sections import AnswerLength, TimedRound

ANSWERS = [AnswerLength(num_tokens=40, room_behind=0, num_answers=2)]
CONDITIONAL = [0.8, 0.7, 0.6, 0.5]
WEIGHTS, DRAFT_WEIGHTS = 2.0e9, 1.0e8


def timed(drafts, batch, context):
    """A round of a made-up machine: a target of 2 GB, a draft of 0.1 GB that drafts step by step."""
    tokens = batch * (drafts + 1)
    return TimedRound(
        num_speculative_tokens=drafts,
        batch_size=batch,
        context_tokens=context,
        draft_seconds=drafts * (0.002 + 1e-5 * batch),
        draft_seconds_after_full=drafts * (0.002 + 1e-5 * batch) + 0.001,
        verify_seconds=0.03 + 2e-4 * tokens,
        other_seconds=0.001,
        draft_bytes=drafts * DRAFT_WEIGHTS,
        draft_flops=drafts * batch * DRAFT_WEIGHTS,
        verify_bytes=WEIGHTS,
        verify_flops=tokens * WEIGHTS,
    )


SWEEP = [timed(drafts, *place) for drafts in range(5) for place in ((1, 64), (8, 64), (1, 512))]


def tokens_per_round(profile, drafts):
    return 1 + profile.accepted(drafts) @ np.arange(drafts + 1)


@pytest.fixture
def profile():
    return AcceptanceProfile(CONDITIONAL, by_text_alone=False)


@pytest.fixture
def model(profile):
    return CostModel(MeasuredCosts(SWEEP), profile, ANSWERS, 4)


def play(drafts, answer, dice):
    """Return the seconds of an answer at batch 1, round by round with thrown coins."""
    left, seconds, after_full = answer, 0.0, False
    while left > 0:
        own = min(drafts, left - 1)
        cost = timed(own, 1, 64)
        seconds += cost.verify_seconds + cost.other_seconds
        seconds += cost.draft_seconds_after_full if after_full else cost.draft_seconds
        accepted = next((n for n in range(own) if dice.random() > CONDITIONAL[n]), own)
        after_full = accepted == drafts
        left -= accepted + 1
    return seconds


@pytest.mark.parametrize("drafts", [1, 4])
def test_the_predicted_speedup_is_that_of_rounds_played_out(model, drafts):
    dice = np.random.default_rng(drafts)
    plain = timed(0, 1, 64).verify_seconds + timed(0, 1, 64).other_seconds
    played = 40 * plain / np.mean([play(drafts, 40, dice) for _ in range(4000)])
    assert model.speedup(drafts, 1, 64) == pytest.approx(played, rel=0.01)


def test_where_memory_limits_a_round_costs_its_weights_whatever_its_rows(profile):
    model = CostModel(RooflineCosts(SWEEP, 1e9, 1e30), profile, ANSWERS, 4)
    long = CostModel(RooflineCosts(SWEEP, 1e9, 1e30), profile, [AnswerLength(num_tokens=5000, room_behind=0, num_answers=1)], 4)
    # tau / (gamma c + 1), c the ratio of the bytes.
    expected = tokens_per_round(profile, 4) / (4 * DRAFT_WEIGHTS / WEIGHTS + 1)
    assert long.speedup(4, 1, 64) == pytest.approx(expected, rel=2e-3)
    assert model.break_even_batch(64) is None


def test_the_break_even_batch_is_where_the_best_number_of_drafts_ceases_to_pay(profile):
    model = CostModel(RooflineCosts(SWEEP, 1e9, 3e10), profile, ANSWERS, 4)
    paying = [batch for batch in range(1, 200) if model.best(batch, 64)[1] > 1]
    assert model.break_even_batch(64) == paying[-1] == len(paying)
    assert 10 < paying[-1] < 100


def test_the_predictions_are_those_of_the_model_for_this_run_and_other_settings(model):
    checked = predictions(model, SWEEP, ANSWERS, 3, 1, 100)
    assert checked.decode_speedup == model.speedup(3, 1, 100)
    speedups = [model.speedup(drafts, 1, 100) for drafts in range(1, 5)]
    assert model.best(1, 100) == (1 + int(np.argmax(speedups)), max(speedups))
    assert predictions(model, SWEEP, ANSWERS, 5, 1, 100).decode_speedup is None  # more drafts than the sweep timed
    assert {each.context_tokens for each in checked.settings} == {64, 100, 512}
    own = [each for each in checked.settings if each.batch_size == 4 and each.context_tokens == 512]
    assert [each.decode_speedup for each in own] == [model.speedup(drafts, 4, 512) for drafts in range(1, 5)]


PLACES = [(1, 64), (4, 64), (16, 64), (1, 1024)]
SIZES = [(drafts, *place) for drafts in range(9) for place in PLACES]


def truth(drafts, batch, context):
    """Seconds of a forward with a floor, a slope beyond 32 tokens, and keys and values."""
    tokens = batch * (drafts + 1)
    return 0.02 + 1e-4 * tokens + 5e-4 * max(0, tokens - 32) + 2e-6 * batch * context


def test_the_fit_finds_the_terms_that_made_the_costs_and_tells_those_beyond():
    surface = Surface({sizes: truth(*sizes) for sizes in SIZES}, forward_terms)
    assert surface.factors_F == pytest.approx([0.02, 1e-4, 0, 5e-4, 0, 2e-6, 0], abs=1e-8)
    for sizes in ((3, 64, 64), (8, 256, 4096), (0, 2, 500)):
        assert surface(*sizes) == pytest.approx(truth(*sizes), rel=1e-4)


def test_measured_costs_come_back_although_no_fit_passes_through_them():
    dice = np.random.default_rng(0)
    measured = {sizes: truth(*sizes) * dice.uniform(0.5, 2.0) for sizes in SIZES}
    surface = Surface(measured, forward_terms)
    assert [surface(*sizes) for sizes in SIZES] == pytest.approx(list(measured.values()))
    assert max(abs(surface.fit(*sizes) / cost - 1) for sizes, cost in measured.items()) > 0.2


# --- rounds -------------------------------------------------------------------------------------------------------


LONGEST = 8


def play_text(right, drafts):
    """Return how many drafts each round of a long text kept, `right` saying where the draft guesses what comes."""
    place, kept = 0, []
    while place + drafts < len(right):
        accepted = next((n for n in range(drafts) if not right[place + n]), drafts)
        kept.append(accepted)
        place += accepted + 1
    return np.array(kept)


def conditional(kept, drafts):
    return [float((kept > n).sum() / (kept >= n).sum()) for n in range(drafts)]


@pytest.fixture(scope="module")
def right():
    """Say where a draft is right in a text whose stretches of about 25 tokens are easy (0.9) or hard (0.2) by turns."""
    dice = np.random.default_rng(0)
    easy = np.cumsum(dice.random(400_000) < 0.04) % 2 == 0
    return dice.random(400_000) < np.where(easy, 0.9, 0.2)


def test_chances_are_products_of_the_measured_ones_and_go_on_with_the_last():
    profile = AcceptanceProfile([0.5, 0.25, None], by_text_alone=False)
    assert profile.accepted(3) == pytest.approx([0.5, 0.5 * 0.75, 0.5 * 0.25 * 0.75, 0.5 * 0.25 * 0.25])
    assert profile.accepted(0) == [1.0]
    with pytest.raises(ValueError, match="no draft was judged"):
        AcceptanceProfile([None, None], by_text_alone=True)
    assert tokens_per_round(profile, 2) == pytest.approx(1 + 0.5 + 0.5 * 0.25)


@pytest.mark.parametrize("by_text_alone", [False, True])
@pytest.mark.parametrize("drafts", [1, 3, 9])
def test_with_one_rate_everywhere_a_round_has_leviathans_tokens(drafts, by_text_alone):
    profile = AcceptanceProfile([0.6] * 30, by_text_alone=by_text_alone)
    assert tokens_per_round(profile, drafts) == pytest.approx((1 - 0.6 ** (drafts + 1)) / (1 - 0.6), rel=1e-6)
    assert profile.accepted(drafts).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("drafts", [1, 3, 6])
def test_shorter_rounds_are_foretold_from_longer_ones_although_the_text_is_uneven(right, drafts):
    profile = AcceptanceProfile(conditional(play_text(right, LONGEST), LONGEST), by_text_alone=True)
    truth = 1 + play_text(right, drafts).mean()
    assert tokens_per_round(profile, drafts) == pytest.approx(truth, rel=0.015)


@pytest.mark.parametrize(("drafts", "tokens", "behind"), [(1, 7, 0), (3, 9, 2), (5, 3, 0), (4, 1, 9)])
def test_the_rounds_of_an_answer_are_those_of_plain_recursion(drafts, tokens, behind):
    profile = AcceptanceProfile([0.7, 0.5, 0.4, 0.3, 0.2], by_text_alone=False)

    @cache
    def rounds(left):
        if left <= 0:
            return (0.0,) * (drafts + 1)
        own = min(drafts, left - 1 + behind)
        total = np.eye(drafts + 1)[own]
        for accepted, chance in enumerate(profile.accepted(own)):
            total = total + chance * np.array(rounds(left - accepted - 1))
        return tuple(total)

    answers = [AnswerLength(num_tokens=tokens, room_behind=behind, num_answers=3)]
    assert expected_rounds(profile, drafts, answers) == pytest.approx(3 * np.array(rounds(tokens)))


def test_answers_are_counted_without_their_first_token_and_with_the_room_behind_an_early_end(make_round, make_generation):
    plain = [make_round(0, 0)] * 5
    ended = make_generation(plain, stop_reason="eos")
    cut = make_generation(plain, stop_reason="length")
    empty = make_generation([], stop_reason="eos")
    assert answer_lengths([replace(ended, stop_reason="stop")], 10) == answer_lengths([ended], 10)
    assert answer_lengths([ended, cut, cut, empty], 10) == [
        AnswerLength(num_tokens=5, room_behind=0, num_answers=2),
        AnswerLength(num_tokens=5, room_behind=4, num_answers=1),
    ]

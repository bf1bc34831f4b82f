"""Expected rounds: against rounds played out on text, against plain recursion, and the formulas of special cases."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from eval.cost.model import AcceptanceProfile, answer_lengths, expected_rounds
from eval.report.sections import AnswerLength

LONGEST = 8


def play(right, drafts):
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
    assert profile.tokens_per_round(2) == pytest.approx(1 + 0.5 + 0.5 * 0.25)


@pytest.mark.parametrize("by_text_alone", [False, True])
@pytest.mark.parametrize("drafts", [1, 3, 9])
def test_with_one_rate_everywhere_a_round_has_leviathans_tokens(drafts, by_text_alone):
    profile = AcceptanceProfile([0.6] * 30, by_text_alone=by_text_alone)
    assert profile.tokens_per_round(drafts) == pytest.approx((1 - 0.6 ** (drafts + 1)) / (1 - 0.6), rel=1e-6)
    assert profile.accepted(drafts).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("drafts", [1, 3, 6])
def test_shorter_rounds_are_foretold_from_longer_ones_although_the_text_is_uneven(right, drafts):
    profile = AcceptanceProfile(conditional(play(right, LONGEST), LONGEST), by_text_alone=True)
    truth = 1 + play(right, drafts).mean()
    assert profile.tokens_per_round(drafts) == pytest.approx(truth, rel=0.015)


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

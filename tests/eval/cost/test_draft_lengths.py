"""A cost rule's settings are what the measured rounds say, and make rounds that are faster than any fixed length's."""

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from eval.cost.draft_length import DraftedRound, calibration_points, expected_rate, fit_stopping
from eval.metrics.distributions import class_sums, describe_classes
from heads.proposers.draft_length import CostRule, calibrated, tokens_per_millisecond

ROWS = [10.0, 10.0, 10.5, 11.0, 12.0]
TIMES = {"draft_step_milliseconds": 1.5, "target_step_milliseconds": ROWS, "round_milliseconds": 0.5}


def random_rounds(number=1500, num_drafts=4):
    """Rounds whose drafts are accepted as often as the square of their confidence; a round is easy or hard as a whole."""
    generator = torch.Generator().manual_seed(0)
    easy = torch.rand(number, 1, generator=generator) < 0.5
    noise = torch.rand(number, num_drafts, generator=generator)
    sure = torch.where(easy, 0.85 + 0.14 * noise, 0.15 + 0.4 * noise).double()
    stays = torch.rand(number, num_drafts, generator=generator) < sure**2
    accepted = stays.long().cumprod(1).sum(1).tolist()
    return [DraftedRound(confidences=tuple(row), num_accepted=n) for row, n in zip(sure.tolist(), accepted, strict=True)]


@pytest.fixture(scope="module")
def rounds():
    return random_rounds()


def test_the_calibration_is_the_acceptance_that_the_rounds_were_made_with(rounds):
    settings = fit_stopping(rounds, **TIMES)
    sure = torch.tensor([0.25, 0.4, 0.88, 0.95])
    torch.testing.assert_close(calibrated(settings.calibration, sure), sure**2, atol=0.05, rtol=0)
    judged = sum(min(round_.num_accepted + 1, 4) for round_ in rounds)
    assert settings.acceptance == pytest.approx(sum(round_.num_accepted for round_ in rounds) / judged)


def test_bins_that_fall_share_their_mean_by_counts():
    pairs = [(0.1, 0)] * 2 + [(0.3, 1)] * 3 + [(0.6, 1), (0.6, 0), (0.6, 0)] + [(0.9, 1)] * 2
    classes = describe_classes(class_sums(*torch.tensor(pairs).T, num_classes=4), ["accepted"])
    points = [(point.confidence, point.acceptance) for point in calibration_points(classes)]
    assert points == [pytest.approx(pair) for pair in ((0.1, 0.0), (0.3, 4 / 6), (0.6, 4 / 6), (0.9, 1.0))]


def test_the_price_of_time_stands_still_and_is_above_what_fixed_lengths_reach(rounds):
    settings = fit_stopping(rounds, **TIMES)
    confidences = torch.tensor([round_.confidences for round_ in rounds], dtype=torch.float64)
    price = settings.tokens_per_second / 1000
    assert expected_rate(settings, confidences) == pytest.approx(price, rel=1e-6)
    alive = calibrated(settings.calibration, confidences).cumprod(1)
    fixed = [
        float((1 + alive[:, :g].sum(1)).mean()) / (0.5 + g * 1.5 + ROWS[g]) for g in range(1, 5)
    ]  # what these rounds would take at each fixed length
    assert price > max(fixed) * 1.01
    assert tokens_per_millisecond(settings.model_copy(update={"tokens_per_second": None}), 4) < price


def test_the_rate_is_that_of_the_rule_played_through_round_by_round(rounds):
    settings = fit_stopping(rounds, **TIMES)
    tokens = milliseconds = 0.0
    for round_ in rounds[:60]:
        rule, steps, drafted, alive = CostRule(settings, 4), 0, 0, 1.0
        tokens += 1
        for sure in round_.confidences:
            decision = rule.decide(torch.tensor([[sure]], dtype=torch.float64))
            steps += 1
            if not decision.drafts_B:
                break
            drafted += 1
            alive *= float(calibrated(settings.calibration, torch.tensor([sure], dtype=torch.float64)))
            tokens += alive
            if not decision.continues_B:
                break
        milliseconds += 0.5 + 1.5 * steps + ROWS[drafted]
    confidences = torch.tensor([round_.confidences for round_ in rounds[:60]], dtype=torch.float64)
    assert expected_rate(settings, confidences) == pytest.approx(tokens / milliseconds)


def test_the_settings_are_ones_that_a_decoder_takes(rounds):
    settings = fit_stopping(rounds, **TIMES)
    config = DecodeConfig(num_speculative_tokens=4, stopping=settings)
    assert DecodeConfig.model_validate(config.model_dump()) == config


def test_shorter_rounds_count_for_the_calibration(rounds):
    short = [DraftedRound(confidences=(0.5,), num_accepted=1)] * 200
    with_short, without = fit_stopping([*rounds, *short], **TIMES), fit_stopping(rounds, **TIMES)
    half = torch.tensor([0.5])
    assert calibrated(with_short.calibration, half) > calibrated(without.calibration, half) + 0.05
    assert with_short.acceptance > without.acceptance


def test_what_cannot_be_fitted_is_refused(rounds):
    with pytest.raises(ValueError, match="no round drafted anything"):
        fit_stopping([], **TIMES)
    with pytest.raises(ValueError, match="times of target steps on 1 to 5 rows are needed for rounds of 4 drafts, got 2"):
        fit_stopping(rounds, draft_step_milliseconds=1.0, target_step_milliseconds=[10.0, 11.0])

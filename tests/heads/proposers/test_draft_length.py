"""Stopping rules decide by distributions alone; the cost rule decides as its formula says, and beats every fixed length."""

import itertools
import math
import random

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import CalibrationPoint, ConfidenceStopping, CostStopping, EntropyStopping
from heads.proposers.chain_builder import ChainBuilder
from heads.proposers.draft_length import CostRule, calibrated, tokens_per_millisecond
from heads.sampling.counter_rng import CounterRNG

CPU = torch.device("cpu")
SURE, UNSURE, BROKEN = [0.0, 5.0, 0.0], [0.0, 0.1, 0.2], [0.0, math.nan, 0.0]
CONFIDENCE = ConfidenceStopping(rule="confidence", threshold=0.5)
ENTROPY = EntropyStopping(rule="entropy", threshold=0.5)


def cost(**settings):
    known = {"draft_step_milliseconds": 1.0, "target_step_milliseconds": [10.0, 10.5, 11.0, 11.5, 12.0, 12.5]}
    return CostStopping(rule="cost", **(known | settings))


def drafting(stopping, rows=2, temperature=0.0, keep_logits=False):
    sampling = DecodeConfig(num_speculative_tokens=4, stopping=stopping, temperature=temperature)
    rng = CounterRNG(0, range(rows), CPU)
    return ChainBuilder([5] * rows, sampling, rng, None, keep_logits=keep_logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stopping", [CONFIDENCE, ENTROPY], ids=lambda stopping: stopping.rule)
def test_the_token_of_the_first_unsure_distribution_is_the_last_of_its_row(stopping, temperature):
    drafts = drafting(stopping, temperature=temperature, keep_logits=True)
    tokens, finished = [], []
    for logits in ([SURE, SURE], [UNSURE, SURE], [SURE, UNSURE], [SURE, SURE]):
        tokens.append(drafts.add(torch.tensor(logits)))
        finished.append(drafts.finished)
    assert finished == [False, False, True, True]
    proposal = drafts.proposal()
    assert proposal.num_drafted == [2, 3]
    assert torch.equal(proposal.tokens_BG, torch.stack(tokens[:3], 1))
    assert proposal.logits_BGV.shape == (2, 3, 3)
    assert (proposal.probs_BGV is None) == (temperature == 0)


def test_a_row_draws_the_same_tokens_with_a_rule_and_without():
    both = [drafting(stopping, temperature=1.0) for stopping in (CONFIDENCE, None)]
    drawn = [[drafts.add(torch.tensor([UNSURE, SURE])).tolist() for _ in range(4)] for drafts in both]
    assert drawn[0] == drawn[1]
    assert [drafts.proposal().num_drafted for drafts in both] == [[1, 4], [4, 4]]


@pytest.mark.parametrize("stopping", [CONFIDENCE, ENTROPY, cost()], ids=lambda stopping: stopping.rule)
def test_a_distribution_that_is_no_distribution_goes_on_to_the_decoder(stopping):
    drafts = drafting(stopping, rows=1, temperature=1.0)
    for _ in range(3):
        drafts.add(torch.tensor([BROKEN]))
    assert not drafts.finished
    assert drafts.proposal().num_drafted == [3]


def test_a_round_in_which_no_row_drafts_has_no_columns_and_no_distributions():
    worthless = [CalibrationPoint(confidence=0.5, acceptance=0.0)]
    drafts = drafting(cost(calibration=worthless), temperature=1.0, keep_logits=True)
    drafts.add(torch.tensor([SURE, UNSURE]))
    proposal = drafts.proposal()
    assert drafts.finished
    assert (proposal.num_drafted, tuple(proposal.tokens_BG.shape)) == ([0, 0], (2, 0))
    assert (proposal.probs_BGV, proposal.logits_BGV) == (None, None)


def test_calibration_is_straight_between_its_points_and_level_beyond():
    points = [CalibrationPoint(confidence=x, acceptance=y) for x, y in ((0.2, 0.1), (0.4, 0.5), (0.8, 0.7))]
    seen = calibrated(points, torch.tensor([0.0, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0]))
    torch.testing.assert_close(seen, torch.tensor([0.1, 0.1, 0.3, 0.5, 0.6, 0.7, 0.7]))
    torch.testing.assert_close(calibrated(points[:1], torch.tensor([0.0, 1.0])), torch.tensor([0.1, 0.1]))
    assert calibrated(points, torch.tensor([math.nan])).isnan().all()
    assert calibrated(points[:1], torch.tensor([math.nan])).isnan().all()


def test_time_is_worth_what_the_best_fixed_length_makes_of_it_unless_it_is_said():
    costs = cost(acceptance=0.7, round_milliseconds=2.0)
    by_length = [sum(0.7**j for j in range(k + 1)) / (2.0 + k * 1.0 + costs.target_step_milliseconds[k]) for k in range(4 + 1)]
    assert tokens_per_millisecond(costs, 4) == pytest.approx(max(by_length))
    assert tokens_per_millisecond(costs, 1) == pytest.approx(max(by_length[:2]))
    assert tokens_per_millisecond(cost(tokens_per_second=50.0), 4) == 0.05


def test_the_cost_rule_decides_as_its_formula_written_out_says():
    rng = random.Random(0)
    answers = set()
    for _ in range(300):
        num_drafts, a, d = rng.randint(1, 5), rng.uniform(0.2, 0.9), rng.choice([0.0, 0.5, 2.0])
        t = [10.0]
        for _ in range(num_drafts):
            t.append(t[-1] + rng.choice([0.0, 0.5, 3.0]))
        rho = rng.uniform(0.05, 0.25)
        settings = cost(
            draft_step_milliseconds=d,
            target_step_milliseconds=t,
            acceptance=a,
            tokens_per_second=1000 * rho,
            round_milliseconds=1.0,
        )
        rule, alive = CostRule(settings, num_drafts), 1.0
        for i in range(1, num_drafts + 1):
            c = rng.uniform(0.05, 1.0)
            alive *= c
            ahead = 0.0
            for k in range(1, num_drafts - i + 1):
                gain = alive * sum(a**j for j in range(1, k + 1))
                ahead = max(ahead, gain - rho * (k * d + t[i + k] - t[i]))
            decision = rule.decide(torch.tensor([[c, 0.0]], dtype=torch.float64))
            draws = alive - rho * (t[i] - t[i - 1]) + ahead > 0
            expected = (draws, draws and ahead > 0)
            assert (decision.drafts_B.item(), decision.continues_B.item()) == expected
            answers.add(expected)
    assert answers == {(True, True), (True, False), (False, False)}


def policy_value(distributions, lengths, accept, rows, step, rho):
    """Expected tokens less rho times expected time of a round whose steps and drafts `lengths` makes of the distributions."""
    worth = 0.0
    for outcome in itertools.product(range(2), repeat=len(distributions)):
        chance = math.prod(distributions[n] if high else 1 - distributions[n] for n, high in enumerate(outcome))
        looked, drafted = lengths(outcome)
        alive = list(itertools.accumulate((accept[high] for high in outcome[:drafted]), lambda one, other: one * other))
        worth += chance * (1 + sum(alive) - rho * (looked * step + rows[drafted]))
    return worth


@pytest.mark.parametrize("rows", [[10.0, 10.0, 10.0, 10.0], [10.0, 10.2, 14.0, 14.1], [10.0, 13.0, 16.0, 19.0]])
@pytest.mark.parametrize("rho", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("step", [0.0, 1.0, 3.0])
def test_the_rule_beats_every_fixed_length(rows, rho, step):
    # A draft's distribution is sure (accepted at 0.9) or not (at 0.3) with equal chances. The rule knows of later
    # distributions the mean alone.
    accept, mean, num_drafts = (0.3, 0.9), 0.6, 3
    points = [CalibrationPoint(confidence=0.3, acceptance=0.3), CalibrationPoint(confidence=0.9, acceptance=0.9)]
    settings = cost(
        draft_step_milliseconds=step,
        target_step_milliseconds=rows,
        calibration=points,
        acceptance=mean,
        tokens_per_second=1000 * rho,
    )

    def by_the_rule(outcome):
        rule = CostRule(settings, num_drafts)
        for number, high in enumerate(outcome):
            decision = rule.decide(torch.tensor([[accept[high]]], dtype=torch.float64))
            if not decision.continues_B:
                return number + 1, number + int(decision.drafts_B)
        return num_drafts, num_drafts

    distributions = [0.5] * num_drafts
    value = policy_value(distributions, by_the_rule, accept, rows, step, rho)
    fixed = max(
        policy_value(distributions, lambda _, g=g: (g, g), accept, rows, step, rho) for g in range(1, num_drafts + 1)
    )  # the first distribution is always looked at
    assert value >= fixed - 1e-12

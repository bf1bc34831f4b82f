"""Drafts come from the distribution that is handed to verification; stopping rules decide by that alone.

The cost rule decides as its formula says, and beats every fixed length.
"""

import itertools
import math
import random

import pytest
import torch

from configs.schema.decoding import DecodeConfig, SamplingConfig
from configs.schema.drafting import CalibrationPoint, ConfidenceStopping, CostStopping, EntropyStopping
from heads.proposers.chain_builder import ChainBuilder, CostRule, calibrated, tokens_per_millisecond
from heads.sampling.counter_rng import CounterRNG, Role
from heads.sampling.probabilities import draw, token_probabilities
from heads.vocabulary import DraftVocabulary

VOCABULARY = DraftVocabulary(token_ids_W=torch.tensor([1, 4, 6]), target_vocab_size=8)
STEPS = [torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 0.5]]), torch.tensor([[1.0, 0.0, 0.2], [0.0, 0.1, 0.3]])]
SAMPLED = SamplingConfig(temperature=0.8, top_p=0.9)
SURE, UNSURE, BROKEN = [0.0, 5.0, 0.0], [0.0, 0.1, 0.2], [0.0, math.nan, 0.0]
CONFIDENCE = ConfidenceStopping(rule="confidence", threshold=0.5)
ENTROPY = EntropyStopping(rule="entropy", threshold=0.5)


def cost(**settings):
    known = {"draft_step_milliseconds": 1.0, "target_step_milliseconds": [10.0, 10.5, 11.0, 11.5, 12.0, 12.5]}
    return CostStopping(rule="cost", **(known | settings))


def drafting(sampling, vocabulary=VOCABULARY, *, keep_logits=False, lengths=(5, 9)):
    rng = CounterRNG(3, range(11, 11 + len(lengths)), torch.device("cpu"))
    return ChainBuilder(lengths, sampling, rng, vocabulary, keep_logits=keep_logits)


def stopped(stopping, temperature=0.0, **others):
    sampling = DecodeConfig(num_speculative_tokens=4, stopping=stopping, temperature=temperature)
    return drafting(sampling, None, **others)


def test_greedy_drafts_are_the_likeliest_tokens_and_have_no_distribution():
    greedy = drafting(SamplingConfig())
    assert [greedy.add(logits_BW).tolist() for logits_BW in STEPS] == [[4, 1], [1, 6]]
    proposal = greedy.proposal()
    assert proposal.tokens_BG.tolist() == [[4, 1], [1, 6]]
    assert (proposal.num_drafted, proposal.probs_BGV, proposal.logits_BGV) == ([2, 2], None, None)


def test_sampled_drafts_follow_the_distribution_that_is_handed_over_with_the_raw_logits():
    sampled = drafting(SAMPLED, keep_logits=True)
    drafted = torch.stack([sampled.add(logits_BW) for logits_BW in STEPS], 1)
    proposal = sampled.proposal()
    assert torch.equal(proposal.tokens_BG, drafted)
    rng = CounterRNG(3, [11, 12], torch.device("cpu"))
    for step, logits_BW in enumerate(STEPS):
        probs_BW = token_probabilities(logits_BW, SAMPLED)
        torch.testing.assert_close(proposal.probs_BGV[:, step, VOCABULARY.token_ids_W], probs_BW)
        torch.testing.assert_close(proposal.probs_BGV[:, step].sum(-1), torch.ones(2))
        # The draft that is step places ahead of a row of length n stands at position n + step, in the round named n.
        uniform_B1 = rng.uniform(Role.DRAFT, torch.tensor([[5 + step], [9 + step]]), torch.tensor([[5], [9]]))
        assert drafted[:, step].tolist() == VOCABULARY.token_ids_W[draw(probs_BW, uniform_B1.squeeze(1))].tolist()
    torch.testing.assert_close(proposal.logits_BGV[..., VOCABULARY.token_ids_W], torch.stack(STEPS, 1))
    assert torch.isneginf(proposal.logits_BGV).sum() == 2 * 2 * 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stopping", [CONFIDENCE, ENTROPY], ids=lambda stopping: stopping.rule)
def test_the_token_of_the_first_unsure_distribution_is_the_last_of_its_row(stopping, temperature):
    drafts, free = (stopped(each, temperature, keep_logits=True) for each in (stopping, None))
    tokens, finished = [], []
    for logits in ([SURE, SURE], [UNSURE, SURE], [SURE, UNSURE], [SURE, SURE]):
        tokens.append(drafts.add(torch.tensor(logits)))
        assert torch.equal(tokens[-1], free.add(torch.tensor(logits)))  # a rule changes no draw
        finished.append(drafts.finished)
    assert finished == [False, False, True, True]
    proposal = drafts.proposal()
    assert (proposal.num_drafted, free.proposal().num_drafted) == ([2, 3], [4, 4])
    assert torch.equal(proposal.tokens_BG, torch.stack(tokens[:3], 1))
    assert proposal.logits_BGV.shape == (2, 3, 3)
    assert (proposal.probs_BGV is None) == (temperature == 0)


@pytest.mark.parametrize("stopping", [CONFIDENCE, ENTROPY, cost()], ids=lambda stopping: stopping.rule)
def test_a_distribution_that_is_no_distribution_goes_on_to_the_decoder(stopping):
    drafts = stopped(stopping, 1.0, lengths=[5])
    for _ in range(3):
        drafts.add(torch.tensor([BROKEN]))
    assert not drafts.finished
    assert drafts.proposal().num_drafted == [3]


def test_a_round_in_which_no_row_drafts_has_no_columns_and_no_distributions():
    worthless = [CalibrationPoint(confidence=0.5, acceptance=0.0)]
    drafts = stopped(cost(calibration=worthless), 1.0, keep_logits=True)
    drafts.add(torch.tensor([SURE, UNSURE]))
    proposal = drafts.proposal()
    assert drafts.finished
    assert (proposal.num_drafted, tuple(proposal.tokens_BG.shape)) == ([0, 0], (2, 0))
    assert (proposal.probs_BGV, proposal.logits_BGV) == (None, None)


def test_calibration_is_straight_between_its_points_and_level_beyond():
    points = [CalibrationPoint(confidence=x, acceptance=y) for x, y in ((0.2, 0.1), (0.4, 0.5), (0.8, 0.7))]
    seen = calibrated(points, torch.tensor([0.0, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0]))
    torch.testing.assert_close(seen, torch.tensor([0.1, 0.1, 0.3, 0.5, 0.6, 0.7, 0.7]))


def test_time_is_worth_what_the_best_fixed_length_makes_of_it_unless_it_is_said():
    costs = cost(acceptance=0.7, round_milliseconds=2.0)
    by_length = [sum(0.7**j for j in range(k + 1)) / (2.0 + k * 1.0 + costs.target_step_milliseconds[k]) for k in range(4 + 1)]
    assert tokens_per_millisecond(costs, 4) == pytest.approx(max(by_length))
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
        times = {"draft_step_milliseconds": d, "target_step_milliseconds": t, "round_milliseconds": 1.0}
        rule, alive = CostRule(cost(acceptance=a, tokens_per_second=1000 * rho, **times), num_drafts), 1.0
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
    times = {"draft_step_milliseconds": step, "target_step_milliseconds": rows, "tokens_per_second": 1000 * rho}
    settings = cost(calibration=[CalibrationPoint(confidence=c, acceptance=c) for c in accept], acceptance=mean, **times)

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

"""The verification rules are lossless, by exact enumeration; each planted bug is caught."""

import itertools
import math

import pytest
import torch

from eval.decoder.chain_rules import ChainVerification, verify_block, verify_greedy, verify_tokens
from tests.support.enumeration import compare, enumerate_rule, random_toy

RULES = {"token": verify_tokens, "block": verify_block}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("looked_up", [False, True])
def test_the_output_follows_the_targets_distribution_exactly(rule, seed, num_drafts, looked_up):
    outcome = enumerate_rule(rule, random_toy(seed, num_drafts=num_drafts, looked_up=looked_up))
    assert outcome.total_variation < 1e-12


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_single_draft_is_accepted_at_the_rate_one_minus_total_variation(rule):
    toy = random_toy(7, num_drafts=1)
    alpha = sum(map(min, toy.p[()], toy.q[()]))
    assert enumerate_rule(rule, toy).tokens_per_round == pytest.approx(1 + alpha, abs=1e-12)


def test_block_verification_commits_no_fewer_tokens_than_token_verification():
    rates = [[enumerate_rule(rule, random_toy(seed)).tokens_per_round for rule in RULES.values()] for seed in range(3)]
    gains = [by_block - by_token for by_token, by_block in rates]
    assert min(gains) >= -1e-12
    assert max(gains) > 1e-3


def no_residual(p, q, tokens, num_drafted, accept, residual, bonus):
    num_accepted = verify_tokens(p, q, tokens, num_drafted, accept, residual, bonus).num_accepted_B
    distribution = p[torch.arange(len(p)), num_accepted]
    plain = torch.searchsorted(distribution.cumsum(-1).contiguous(), residual.unsqueeze(1), right=True).squeeze(1)
    return ChainVerification(num_accepted, plain.clamp(max=p.shape[-1] - 1))


def off_by_one_row(p, *others):
    return verify_tokens(p.roll(1, dims=1), *others)


def another_q_than_was_sampled(p, q, *others):
    return verify_tokens(p, (q**2) / (q**2).sum(-1, keepdim=True), *others)


def one_uniform_for_all_positions(p, q, tokens, num_drafted, accept, *others):
    return verify_tokens(p, q, tokens, num_drafted, accept[:, :1].expand_as(accept), *others)


def bonus_from_the_row_before(p, *others):
    return verify_tokens(torch.cat([p[:, :-1], p[:, -2:-1]], 1), *others)


def first_failure_ends_the_block(*arguments):
    block, stepwise = verify_block(*arguments), verify_tokens(*arguments)
    return ChainVerification(torch.minimum(block.num_accepted_B, stepwise.num_accepted_B), block.next_token_B)


def accepts_a_little_too_often(p, q, tokens, num_drafted, accept, *others):
    return verify_block(p, q, tokens, num_drafted, accept * 0.98, *others)


@pytest.mark.parametrize(
    "mutant",
    [
        accepts_a_little_too_often,
        no_residual,
        off_by_one_row,
        another_q_than_was_sampled,
        one_uniform_for_all_positions,
        bonus_from_the_row_before,
        first_failure_ends_the_block,
    ],
)
def test_enumeration_catches_a_planted_bug(mutant):
    assert max(enumerate_rule(mutant, random_toy(seed)).total_variation for seed in range(2)) > 1e-3


def test_sample_and_match_follows_the_targets_distribution_for_any_deterministic_draft():
    toy, draft = random_toy(5), (1, 0, 2)
    outcomes = []
    for draws in itertools.product(range(3), repeat=4):
        found = verify_greedy(torch.tensor([draws]), torch.tensor([draft]), torch.tensor([3]))
        probability = math.prod(toy.p[draft[:row]][token] for row, token in enumerate(draws))
        next_V = torch.nn.functional.one_hot(found.next_token_B[0], 3).tolist()
        outcomes.append((probability, draft[: int(found.num_accepted_B)], next_V))
    assert compare(toy, outcomes).total_variation < 1e-12


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rows_with_fewer_drafts_are_verified_as_if_they_stood_alone(rule):
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(64, 4, 5, generator=generator).softmax(-1)
    q = (3 * torch.rand(64, 3, 5, generator=generator)).softmax(-1)
    tokens = torch.randint(5, (64, 3), generator=generator)
    accept, residual, bonus = (torch.rand(shape, generator=generator, dtype=torch.float64) for shape in ((64, 3), (64,), (64,)))
    short = rule(p, q, tokens, torch.full((64,), 2), accept, residual, bonus)
    alone = rule(p[:, :3], q[:, :2], tokens[:, :2], torch.full((64,), 2), accept[:, :2], residual, bonus)
    assert torch.equal(short.num_accepted_B, alone.num_accepted_B)
    assert torch.equal(short.next_token_B, alone.next_token_B)


def test_greedy_keeps_the_longest_matching_prefix_and_adds_the_targets_token():
    target = torch.tensor([[5, 6, 7, 8], [5, 9, 7, 8], [4, 6, 7, 8]])
    drafts = torch.tensor([[5, 6, 7], [5, 6, 7], [4, 6, 7]])
    found = verify_greedy(target, drafts, torch.tensor([3, 3, 0]))
    assert found.num_accepted_B.tolist() == [3, 1, 0]
    assert found.next_token_B.tolist() == [8, 9, 4]

"""The rules for several candidates at one position are lossless, by exact enumeration; each planted bug is caught."""

from functools import partial

import pytest
import torch

from eval.decoder.tree_rules import (
    CANDIDATE_RULES,
    CandidateChoice,
    k_seq,
    k_seq_rho,
    reject_recursively,
    verify_tree,
    with_replacement,
    without_replacement,
)
from heads.sampling.probabilities import DRAWS
from tests.support.enumeration import distinct, distribution_of_draws, enumerate_tree, independent, random_toy

SIBLINGS = {"with_replacement": independent, "without_replacement": distinct, "k_seq": independent}


def at_one_position(rule, siblings, seed, count, vocab_size=3):
    toy = random_toy(seed, vocab_size=vocab_size, num_drafts=1)
    return toy, enumerate_tree(partial(verify_tree, rule=rule), toy, [-1] + [0] * count, siblings)


def accepted_share(name, seed, count, vocab_size=4):
    _, outcome = at_one_position(CANDIDATE_RULES[name], SIBLINGS[name], seed, count, vocab_size)
    return outcome.tokens_per_round - 1


@pytest.mark.parametrize("name", CANDIDATE_RULES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_position_with_several_candidates_follows_the_targets_distribution(name, count):
    for seed in range(2):
        _, outcome = at_one_position(CANDIDATE_RULES[name], SIBLINGS[name], seed, count)
        assert outcome.total_variation < 1e-12


@pytest.mark.parametrize("name", DRAWS)
def test_siblings_are_drawn_as_their_rule_expects(name):
    distribution = distribution_of_draws(DRAWS[name])
    q = (0.0, 0.25, 0.75)
    for siblings in torch.cartesian_prod(*[torch.arange(3)] * 3).tolist():
        assert distribution(q, tuple(siblings)) == pytest.approx(SIBLINGS[name](q, siblings), abs=1e-15)


def test_distinct_candidates_are_lossless_where_the_draft_has_fewer_tokens_than_asked_for():
    toy = random_toy(0, num_drafts=1)
    toy.q[()][:] = [0.0, 0.3, 0.7]
    outcome = enumerate_tree(verify_tree, toy, [-1, 0, 0, 0], distinct)
    assert outcome.total_variation < 1e-12
    # Both tokens the draft knows were offered, and the third candidate, which nobody drew, never stays.
    assert outcome.tokens_per_round - 1 <= toy.p[()][1] + toy.p[()][2] + 1e-12


def test_candidates_of_several_drafts_follow_the_targets_distribution():
    other_q = torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64)

    def rule(p_BV, q_BV, tokens_BC, num_candidates_B, accept_BC):
        return reject_recursively(p_BV, [q_BV, other_q.expand_as(q_BV)], tokens_BC, num_candidates_B, accept_BC)

    _, outcome = at_one_position(rule, lambda q, siblings: q[siblings[0]] * other_q[siblings[1]].item(), 3, 2)
    assert outcome.total_variation < 1e-12


# --- planted bugs -------------------------------------------------------------------------------------------------


def the_next_token_comes_from_p(p_BV, q_BV, tokens_BC, num_candidates_B, accept_BC):
    return CandidateChoice(without_replacement(p_BV, q_BV, tokens_BC, num_candidates_B, accept_BC).accepted_B, p_BV)


def the_residual_forgets_all_but_the_last_rejection(p_BV, q_BV, tokens_BC, num_candidates_B, accept_BC):
    choice = without_replacement(p_BV, q_BV, tokens_BC, num_candidates_B, accept_BC)
    return CandidateChoice(choice.accepted_B, (p_BV - q_BV).clamp(min=0))


def the_draft_is_not_renormalised(p_BV, q_BV, tokens_BC, num_candidates_B, accept_BC):
    distributions = [q_BV, q_BV.scatter(1, tokens_BC[:, :1], 0.0)]
    return reject_recursively(p_BV, distributions, tokens_BC, num_candidates_B, accept_BC)


def one_uniform_for_all_candidates(p_BV, q_BV, tokens_BC, num_candidates_B, accept_BC):
    return without_replacement(p_BV, q_BV, tokens_BC, num_candidates_B, accept_BC[:, :1].expand_as(accept_BC))


@pytest.mark.parametrize(
    ("mutant", "siblings"),
    [
        (the_next_token_comes_from_p, distinct),
        (the_residual_forgets_all_but_the_last_rejection, distinct),
        (the_draft_is_not_renormalised, distinct),
        (one_uniform_for_all_candidates, distinct),
        (with_replacement, distinct),
        (without_replacement, independent),
        (k_seq, distinct),
    ],
)
def test_enumeration_catches_a_planted_bug_at_one_position(mutant, siblings):
    assert max(at_one_position(mutant, siblings, seed, 2)[1].total_variation for seed in range(2)) > 1e-3


# --- how much is accepted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_k_seq_keeps_its_bound_and_no_independent_rule_beats_the_optimal_coupling(count):
    # b(k) = sum min(p, k q)/k and concavity give the bound; a token nobody drew cannot be accepted, which gives the other.
    for seed in range(2):
        toy = random_toy(seed, vocab_size=4, num_drafts=1)
        pairs = list(zip(toy.p[()], toy.q[()], strict=True))
        bound = (1 - (1 - 1 / count) ** count) * sum(min(p, count * q) for p, q in pairs)
        optimum = sum(min(p, 1 - (1 - q) ** count) for p, q in pairs)
        assert bound - 1e-6 <= accepted_share("k_seq", seed, count) <= optimum + 1e-12
        assert accepted_share("with_replacement", seed, count) <= optimum + 1e-12


def test_the_discount_of_k_seq_is_the_root_of_its_equation():
    p, q = torch.rand(2, 50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    count_B = torch.arange(50) % 4 + 1
    rho_B = k_seq_rho(p, q, count_B)
    b_B = torch.minimum(q, p / rho_B.unsqueeze(1)).sum(-1)
    excess_B = rho_B * b_B - (1 - (1 - b_B) ** count_B)
    assert excess_B.min() >= 0
    assert excess_B.max() < 1e-5
    assert torch.equal(rho_B[count_B == 1], torch.ones(13, dtype=torch.float64))

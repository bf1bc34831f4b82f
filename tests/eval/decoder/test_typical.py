"""Typical acceptance does what its formula says, is the greedy walk at temperature 0, and is not lossless above."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.decoding import TypicalAcceptance
from eval.decoder.chain_rules import verify_greedy
from eval.decoder.tree_rules import match_tree, tokens_of
from eval.decoder.typical import typical_threshold, verify_typical, verify_typical_tree
from tests.support.enumeration import enumerate_rule, random_toy

DEFAULTS = TypicalAcceptance(kind="typical")
EPSILON, DELTA = DEFAULTS.epsilon, DEFAULTS.delta


def random_distributions(seed, *shape):
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).softmax(-1)


def is_plausible(p_V, token):
    entropy = -sum(p * math.log(p) for p in p_V if p > 0)
    return p_V[token] > min(EPSILON, DELTA * math.exp(-entropy))


def test_the_threshold_is_epsilon_where_the_target_is_sure_and_falls_with_its_entropy():
    sure, undecided = torch.tensor([1.0, 0, 0]), torch.full((1000,), 1e-3)
    assert typical_threshold(sure, EPSILON, DELTA).item() == pytest.approx(EPSILON)
    assert typical_threshold(undecided, EPSILON, DELTA).item() == pytest.approx(DELTA / 1000, rel=1e-4)


def naive_path(p_NV, tokens, parents):
    """Give the deepest plausible path, the likeliest of equally deep ones, by trying every node as its end."""
    best = (0, 0.0, [])
    for end in range(1, len(parents)):
        path, node = [], end
        while node > 0:
            path.insert(0, node)
            node = parents[node]
        if all(is_plausible(p_NV[parents[n]], tokens[n]) for n in path):
            score = sum(math.log(p_NV[parents[n]][tokens[n]]) for n in path)
            best = max(best, (len(path), score, path), key=lambda each: each[:2])  # of duplicates the first
    return best[2]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_tree_keeps_the_deepest_plausible_path_and_the_likeliest_of_equals(data, seed):
    parents = [-1] + [data.draw(st.integers(0, node)) for node in range(data.draw(st.integers(1, 7)))]
    p_BNV = random_distributions(seed, 3, len(parents), 4)
    tokens_BN = torch.randint(4, (3, len(parents)), generator=torch.Generator().manual_seed(seed))
    verdict = verify_typical_tree(p_BNV, tokens_BN, torch.tensor(parents), len(parents) - 1, EPSILON, DELTA)
    for row in range(3):
        path = naive_path(p_BNV[row].tolist(), tokens_BN[row].tolist(), parents)
        assert verdict.path_BD[row].tolist() == path + [-1] * (len(parents) - 1 - len(path))
        assert verdict.num_accepted_B[row] == len(path)
        assert verdict.next_token_B[row] == p_BNV[row, path[-1] if path else 0].argmax()


def test_a_chain_keeps_its_leading_plausible_drafts_and_never_more_than_were_drafted():
    p_BKV, tokens_BG = (
        random_distributions(0, 100, 4, 5),
        torch.randint(5, (100, 3), generator=torch.Generator().manual_seed(0)),
    )
    num_drafted_B = torch.arange(100) % 4
    verdict = verify_typical(p_BKV, tokens_BG, num_drafted_B, EPSILON, DELTA)
    for row in range(100):
        flags = [is_plausible(p_BKV[row, i].tolist(), tokens_BG[row, i]) for i in range(num_drafted_B[row])]
        accepted = (*flags, False).index(False)
        assert verdict.num_accepted_B[row] == accepted
        assert verdict.next_token_B[row] == p_BKV[row, accepted].argmax()
    assert set(verdict.num_accepted_B.tolist()) == {0, 1, 2, 3}


def test_at_temperature_0_it_is_greedy():
    generator = torch.Generator().manual_seed(0)
    target_BN, tokens_BN = torch.randint(3, (2, 50, 6), generator=generator)
    p_BNV = torch.nn.functional.one_hot(target_BN, 3).double()
    parents_N = torch.tensor([-1, 0, 1, 1, 3, 2])
    tokens_BN[:, 3] = (tokens_BN[:, 2] + 1) % 3  # siblings that differ
    one, other = (
        verify_typical_tree(p_BNV, tokens_BN, parents_N, 3, EPSILON, DELTA),
        match_tree(tokens_of(target_BN), tokens_BN, parents_N, 3),
    )
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    chain, greedy = (
        verify_typical(p_BNV, tokens_BN[:, 1:], torch.full((50,), 5), EPSILON, DELTA),
        verify_greedy(target_BN, tokens_BN[:, 1:], torch.full((50,), 5)),
    )
    assert all(torch.equal(*pair) for pair in zip(chain, greedy, strict=True))


def test_its_output_does_not_follow_the_targets_distribution():
    outcome = enumerate_rule(lambda p, q, tokens, count, *_: verify_typical(p, tokens, count, EPSILON, DELTA), random_toy(0))
    assert outcome.total_variation > 0.1

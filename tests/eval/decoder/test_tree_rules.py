"""Verification along trees is lossless, by exact enumeration, and is that of chains on a chain; each planted bug is caught."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eval.decoder.tree_rules
from eval.decoder.chain_rules import verify_tokens
from eval.decoder.tree_rules import CANDIDATE_RULES, children_of, k_seq, match_tree, rows_of, tokens_of, verify_tree
from heads.sampling.probabilities import draw
from tests.support.enumeration import distinct, enumerate_tree, independent, random_toy

SIBLINGS = {"with_replacement": independent, "without_replacement": distinct, "k_seq": independent}
# Depth and parents: an uneven one, one whose nodes are not numbered level by level, a chain with side branches.
TREES = [(2, [-1, 0, 0, 1, 1, 2]), (2, [-1, 0, 1, 0, 3]), (3, [-1, 0, 1, 2, 1, 0])]


# --- the distribution of the output ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CANDIDATE_RULES)
@pytest.mark.parametrize(("depth", "parents"), TREES)
def test_a_tree_follows_the_targets_distribution(name, depth, parents):
    toy = random_toy(depth + len(parents), num_drafts=depth)
    outcome = enumerate_tree(partial(verify_tree, rule=CANDIDATE_RULES[name]), toy, parents, SIBLINGS[name])
    assert outcome.total_variation < 1e-12
    assert outcome.tokens_per_round > 1


# --- planted bugs -------------------------------------------------------------------------------------------------


def distributions_of_the_parents(p_after, q_BNV, tokens_BN, parents_BN, accept_BN, next_BK, *, width):
    above = parents_BN.clamp(min=0)
    return verify_tree(lambda node_B: p_after(above[node_B]), q_BNV, tokens_BN, parents_BN, accept_BN, next_BK, width=width)


def the_last_node_is_not_kept(*arguments, width):
    verdict = verify_tree(*arguments, width=width)
    return verdict._replace(path_BD=torch.cat([verdict.path_BD[:, :-1], torch.full_like(verdict.path_BD[:, -1:], -1)], 1))


@pytest.mark.parametrize("mutant", [distributions_of_the_parents, the_last_node_is_not_kept])
def test_enumeration_catches_a_planted_bug_in_the_walk(mutant):
    assert enumerate_tree(mutant, random_toy(0, num_drafts=2), [-1, 0, 0, 1], distinct).total_variation > 1e-3


def test_enumeration_catches_children_in_another_order_than_they_were_drawn_in(monkeypatch):
    monkeypatch.setattr(
        eval.decoder.tree_rules, "children_of", lambda parents_BN, width: children_of(parents_BN, width).flip(2)
    )
    assert enumerate_tree(verify_tree, random_toy(0, num_drafts=1), [-1, 0, 0], distinct).total_variation > 1e-3


# --- identities ---------------------------------------------------------------------------------------------------


def random_round(generator, num_rows, parents, vocab_size=4, *, dtype=torch.float64):
    """Give random distributions, tokens drawn regardless of them, and uniforms."""
    num_nodes = len(parents)
    p, q = (2 * torch.randn(2, num_rows, num_nodes, vocab_size, generator=generator, dtype=dtype)).softmax(-1)
    tokens = torch.randint(vocab_size, (num_rows, num_nodes), generator=generator)
    accept, following = torch.rand(2, num_rows, num_nodes, generator=generator, dtype=torch.float64)
    return p, q, tokens, accept, following


@pytest.mark.parametrize("rule", CANDIDATE_RULES.values(), ids=CANDIDATE_RULES)
def test_a_chain_is_judged_as_by_token_rejection(rule):
    p, q, tokens, accept, following = random_round(torch.Generator().manual_seed(0), 200, [-1, 0, 1, 2])
    chain = torch.tensor([-1, 0, 1, 2])
    tree = verify_tree(rows_of(p), q, tokens, chain, accept, following[:, :1].expand(-1, 4), width=1, rule=rule)
    uniform = following[:, 0]
    verdict = verify_tokens(p, q[:, :-1], tokens[:, 1:], torch.full((200,), 3), accept[:, 1:], uniform, uniform)
    assert torch.equal(tree.num_accepted_B, verdict.num_accepted_B)
    assert torch.equal(tree.next_token_B, verdict.next_token_B)
    assert set(verdict.num_accepted_B.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("rule", CANDIDATE_RULES.values(), ids=CANDIDATE_RULES)
def test_a_draft_that_is_the_target_has_its_first_candidate_accepted_everywhere(rule):
    parents = torch.tensor([-1, 0, 0, 1, 1, 3])
    p, _, tokens, accept, following = random_round(torch.Generator().manual_seed(1), 100, parents, dtype=torch.float32)
    verdict = verify_tree(rows_of(p), p, tokens, parents, accept * 0.99, following[:, :4], width=2, rule=rule)
    if rule is not k_seq:  # whose discount serves the later candidates at the cost of the first
        assert torch.equal(verdict.path_BD, torch.tensor([1, 3, 5]).expand(100, -1))
    alone = torch.tensor([-1, 0, 1, 2, 3, 4])
    verdict = verify_tree(rows_of(p), p, tokens, alone, accept * 0.99, following, width=1, rule=rule)
    assert verdict.num_accepted_B.tolist() == [5] * 100


@st.composite
def trees(draw_value):
    """Give the parents of a random tree of up to 9 nodes, and its depth."""
    parents = [-1] + [draw_value(st.integers(0, node)) for node in range(draw_value(st.integers(0, 8)))]
    depths = [0]
    for above in parents[1:]:
        depths.append(depths[above] + 1)
    return parents, max(depths)


def plain_draws(p_NV, parents, tokens_N, uniform_K):
    """Decode plainly along a tree of distributions: tokens until one leaves the tree, and the nodes walked."""
    node, drawn, path = 0, [], []
    for uniform in uniform_K:
        drawn.append(int(draw(p_NV[node], uniform)))
        children = [child for child, above in enumerate(parents) if above == node and tokens_N[child] == drawn[-1]]
        if not children:
            break
        node = children[0]
        path.append(node)
    return drawn, path


@settings(max_examples=25, deadline=None)
@given(tree=trees(), seed=st.integers(0, 1000))
def test_a_tree_without_a_draft_distribution_gives_the_very_tokens_of_plain_decoding(tree, seed):
    parents, depth = tree
    p, _, tokens, accept, following = random_round(torch.Generator().manual_seed(seed), 3, parents, vocab_size=3)
    following = following[:, :1].expand(-1, depth + 1) if depth + 1 > len(parents) else following[:, : depth + 1]
    verdict = verify_tree(rows_of(p), None, tokens, torch.tensor(parents), accept, following, width=9)
    for row in range(3):
        drawn, path = plain_draws(p[row], parents, tokens[row].tolist(), following[row])
        kept = verdict.path_BD[row, : verdict.num_accepted_B[row]].tolist()
        assert kept == path
        assert [*tokens[row, kept].tolist(), int(verdict.next_token_B[row])] == drawn


@settings(max_examples=25, deadline=None)
@given(
    forest=st.lists(trees(), min_size=2, max_size=2), seed=st.integers(0, 1000), name=st.sampled_from(sorted(CANDIDATE_RULES))
)
def test_rows_with_different_trees_are_judged_as_if_each_stood_alone(forest, seed, name):
    size, depth = max(len(parents) for parents, _ in forest), max(depth for _, depth in forest)
    p, q, tokens, accept, _ = random_round(torch.Generator().manual_seed(seed), 2, range(size))
    following = torch.rand(2, depth + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    padded = torch.tensor([parents + [-1] * (size - len(parents)) for parents, _ in forest])
    rule = CANDIDATE_RULES[name]
    together = verify_tree(rows_of(p), q, tokens, padded, accept, following, width=size, rule=rule)
    for row, (parents, _) in enumerate(forest):
        of_row = [values[row : row + 1, : len(parents)] for values in (p, q, tokens, accept)]
        alone = verify_tree(
            rows_of(of_row[0]), *of_row[1:3], torch.tensor(parents), of_row[3], following[row : row + 1], width=size, rule=rule
        )
        assert torch.equal(together.path_BD[row], alone.path_BD[0])
        assert together.next_token_B[row] == alone.next_token_B[0]
        kept = alone.path_BD[0, : alone.num_accepted_B[0]].tolist()
        assert [parents[node] for node in kept] == [0, *kept][: len(kept)]


def test_greedy_walks_the_child_that_bears_the_targets_choice_and_pads_the_path():
    parents = torch.tensor([-1, 0, 0, 2, 2])
    tokens = torch.tensor([[9, 4, 5, 6, 0]] * 4)
    target = torch.tensor([[5, 1, 0, 2, 3], [4, 7, 7, 7, 7], [8, 7, 7, 7, 7], [0, 7, 7, 7, 7]])
    verdict = match_tree(tokens_of(target), tokens, parents, 2)
    assert verdict.path_BD.tolist() == [[2, 4], [1, -1], [-1, -1], [-1, -1]]
    assert verdict.num_accepted_B.tolist() == [2, 1, 0, 0]
    assert verdict.next_token_B.tolist() == [3, 7, 8, 0]


def test_children_are_listed_in_the_order_of_their_numbers_and_cut_at_the_width():
    parents = torch.tensor([[-1, 0, 1, 0, 1, 0], [-1, 0, 1, 2, 3, 4]])
    wide, narrow = children_of(parents, 3), children_of(parents, 1)
    assert wide[0].tolist() == [[1, 3, 5], [2, 4, -1], *[[-1, -1, -1]] * 4]
    assert wide[1, :, 0].tolist() == [1, 2, 3, 4, 5, -1]
    assert torch.equal(narrow, wide[:, :, :1])

"""Every rule is lossless on chains, siblings and trees, by exact enumeration; identities hold."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.decoding import ConfidenceStopping, DecodeConfig
from eval.decoder.rules import (
    CANDIDATE_RULES,
    k_seq_rho,
    match_tree,
    verify_block,
    verify_greedy,
    verify_tokens,
    verify_tree,
)
from heads.proposers.builders import ChainBuilder
from heads.proposers.protocol import RoundInputs
from heads.sampling.draws import CounterRNG, TextCounts, draw, penalised, token_probabilities
from tests.support.distribution_checks import naive_penalised
from tests.support.enumeration import (
    SIBLINGS,
    compare,
    distinct,
    enumerate_rule,
    enumerate_tree,
    random_toy,
    rows_of,
)

RULES = {"token": verify_tokens, "block": verify_block}
# Depth and parents: siblings, an uneven tree, one whose nodes are not numbered level by level, a chain with side branches.
TREES = [
    *((1, [-1] + [0] * count) for count in (1, 2, 3)),
    *((2, [-1, 0, 0, 1, 1, 2]), (2, [-1, 0, 1, 0, 3]), (3, [-1, 0, 1, 2, 1, 0])),
]
chain_rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
candidate_rules = pytest.mark.parametrize("name", CANDIDATE_RULES)


# --- the distribution of the output -------------------------------------------------------------------------------


@chain_rules
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("looked_up", [False, True])
def test_a_chain_follows_the_targets_distribution(rule, num_drafts, looked_up):
    for seed in range(2):
        outcome = enumerate_rule(rule, random_toy(seed, num_drafts=num_drafts, looked_up=looked_up))
        assert outcome.total_variation < 1e-12


STOPPING = {
    "distribution": ConfidenceStopping(rule="confidence", threshold=0.7),
    "estimate": ConfidenceStopping(rule="confidence", threshold=0.4, by="estimate"),
}


@chain_rules
@pytest.mark.parametrize("by", STOPPING)
def test_a_chain_follows_it_where_what_the_draft_says_of_its_tokens_decides_the_length(rule, by):
    seen = set()

    def stopped(p, q, tokens, num_drafted, *others):
        """Draft until the chain is unsure, by its distributions or by estimates that depend on the tokens before."""
        B, G = tokens.shape
        inputs = RoundInputs.of([[0]] * B, CounterRNG(0, range(B), torch.device("cpu")))
        chain = ChainBuilder(inputs, DecodeConfig(num_speculative_tokens=G, stopping=STOPPING[by]), None, keep_logits=False)
        for i in range(G):
            chain.add(q[:, i].log(), 0.95 - (tokens[:, :i] * torch.arange(3, 3 + i)).sum(1) % 5 / 5)
        lengths = chain.proposal().num_drafted.host
        seen.update(lengths)
        return rule(p, q, tokens, torch.tensor(lengths), *others)

    assert max(enumerate_rule(stopped, random_toy(seed)).total_variation for seed in range(3)) < 1e-12
    assert len(seen) > 1


@candidate_rules
@pytest.mark.parametrize(("depth", "parents"), TREES)
def test_a_tree_follows_the_targets_distribution(name, depth, parents):
    toy = random_toy(depth + len(parents), num_drafts=depth)
    outcome = enumerate_tree(partial(verify_tree, rule=CANDIDATE_RULES[name]), toy, parents, SIBLINGS[name])
    assert outcome.total_variation < 1e-12
    assert outcome.tokens_per_round > 1


def test_distinct_candidates_are_lossless_where_the_draft_has_fewer_tokens_than_asked_for():
    toy = random_toy(0, num_drafts=1)
    toy.q[()][:] = [0.0, 0.3, 0.7]
    outcome = enumerate_tree(verify_tree, toy, [-1, 0, 0, 0], distinct)
    assert outcome.total_variation < 1e-12
    # Both tokens the draft knows were offered, and the third candidate, which nobody drew, never stays.
    assert outcome.tokens_per_round - 1 <= toy.p[()][1] + toy.p[()][2] + 1e-12


def penalised_toy(seed, penalties, prompt):
    """Give logits of p and q after each prefix, and the toy of their distributions with naive penalties."""
    toy, generator = random_toy(seed, num_drafts=2), torch.Generator().manual_seed(seed)
    p_logits, q_logits = ({each: 2 * torch.randn(3, generator=generator) for each in toy.p} for _ in range(2))
    for logits, laws in ((p_logits, toy.p), (q_logits, toy.q)):
        for prefix, row in logits.items():
            laws[prefix] = torch.tensor(naive_penalised(row.tolist(), prompt, prefix, penalties)).softmax(-1).tolist()
    return p_logits, q_logits, toy


@chain_rules
def test_a_chain_follows_it_where_drafts_count_for_the_penalties_of_those_behind_them(rule):
    prompt = (2, 2)
    penalties = DecodeConfig(temperature=1.0, repetition_penalty=1.6, presence_penalty=0.4, frequency_penalty=1.1)
    p_logits, q_logits, toy = penalised_toy(3, penalties, prompt)

    def penalising(_p, _q, tokens, *others):
        """Judge the tokens by what decoder and draft make of the logits."""
        rows = tokens.tolist()
        p_logits_BKV, q_logits_BKV = (
            torch.stack([torch.stack([logits[tuple(row[:k])] for k in range(3)]) for row in rows])
            for logits in (p_logits, q_logits)
        )
        texts, device = [list(prompt)] * len(rows), torch.device("cpu")
        counts = TextCounts.of(penalties, texts, [2] * len(rows), 3, device)
        inputs = RoundInputs.of(texts, CounterRNG(0, range(len(rows)), device), num_drafts=2)
        chain = ChainBuilder(replace(inputs, counts=counts), penalties, None, keep_logits=False)
        chain._drawn = lambda step, _: tokens[:, step]
        for step in range(2):
            chain.add(q_logits_BKV[:, step])
        p = token_probabilities(penalised(p_logits_BKV, counts.along(tokens)), penalties)
        return rule(p.double(), chain.proposal().probs_BGV.double(), tokens, *others)

    assert enumerate_rule(penalising, toy).total_variation < 1e-6


def test_matching_the_targets_draws_is_rejection_against_a_one_hot_draft_with_the_residual():
    toy, draft = random_toy(5), (1, 0, 2)
    for prefix in toy.q:
        toy.q[prefix] = [float(token == draft[min(len(prefix), 2)]) for token in range(3)]
    outcomes = []
    for draws in itertools.product(range(3), repeat=4):
        found = verify_greedy(torch.tensor([draws]), torch.tensor([draft]), torch.tensor([3]))
        probability = math.prod(toy.p[draft[:row]][token] for row, token in enumerate(draws))
        next_V = torch.nn.functional.one_hot(found.next_token_B[0], 3).tolist()
        outcomes.append((probability, draft[: int(found.num_accepted_B)], next_V))
    assert compare(toy, outcomes).total_variation < 1e-12
    for kept in range(3):  # a draft stays with probability p of it, else the residual, p without it, gives the token
        before = math.prod(toy.p[draft[:row]][draft[row]] for row in range(kept))
        p = toy.p[draft[:kept]]
        reached = [
            sum(weight * next_V[token] for weight, drafts, next_V in outcomes if len(drafts) == kept) for token in range(3)
        ]
        assert reached == pytest.approx([0.0 if token == draft[kept] else before * p[token] for token in range(3)], abs=1e-12)
    by_rejection = enumerate_rule(verify_tokens, toy)
    assert by_rejection.total_variation < 1e-12
    assert by_rejection.tokens_per_round == pytest.approx(compare(toy, outcomes).tokens_per_round, abs=1e-12)


# --- how much is accepted -----------------------------------------------------------------------------------------


def test_one_draft_stays_at_one_minus_total_variation_and_a_block_commits_no_fewer_tokens():
    toy = random_toy(7, num_drafts=1)
    alpha = sum(map(min, toy.p[()], toy.q[()]))
    for rule in RULES.values():
        assert enumerate_rule(rule, toy).tokens_per_round == pytest.approx(1 + alpha, abs=1e-12)
    rates = [[enumerate_rule(rule, random_toy(seed)).tokens_per_round for rule in RULES.values()] for seed in range(3)]
    gains = [by_block - by_token for by_token, by_block in rates]
    assert min(gains) >= -1e-12
    assert max(gains) > 1e-3


def test_the_discount_of_k_seq_is_the_root_of_its_equation():
    p, q = torch.rand(2, 50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    count_B = torch.arange(50) % 4 + 1
    rho_B = k_seq_rho(p, q, count_B)
    b_B = torch.minimum(q, p / rho_B.unsqueeze(1)).sum(-1)
    excess_B = rho_B * b_B - (1 - (1 - b_B) ** count_B)
    assert excess_B.min() >= 0
    assert excess_B.max() < 1e-5
    assert torch.equal(rho_B[count_B == 1], torch.ones(13, dtype=torch.float64))


# --- identities ---------------------------------------------------------------------------------------------------


def random_round(generator, num_rows, parents, vocab_size=4):
    """Give random distributions, tokens drawn regardless of them, and uniforms."""
    p, q = (2 * torch.randn(2, num_rows, len(parents), vocab_size, generator=generator, dtype=torch.float64)).softmax(-1)
    tokens = torch.randint(vocab_size, (num_rows, len(parents)), generator=generator)
    accept, following = torch.rand(2, num_rows, len(parents), generator=generator, dtype=torch.float64)
    return p, q, tokens, accept, following


@candidate_rules
def test_a_tree_of_one_branch_is_judged_as_a_chain_by_token_rejection(name):
    p, q, tokens, accept, following = random_round(torch.Generator().manual_seed(0), 200, [-1, 0, 1, 2])
    chain, following, rule = torch.tensor([-1, 0, 1, 2]), following[:, :1].expand(-1, 4), CANDIDATE_RULES[name]
    tree = verify_tree(rows_of(p), q, tokens, chain, accept, following, width=1, rule=rule)
    uniform = following[:, 0]
    verdict = verify_tokens(p, q[:, :-1], tokens[:, 1:], torch.full((200,), 3), accept[:, 1:], uniform, uniform)
    assert torch.equal(tree.num_accepted_B, verdict.num_accepted_B)
    assert torch.equal(tree.next_token_B, verdict.next_token_B)
    assert set(verdict.num_accepted_B.tolist()) == {0, 1, 2, 3}
    tree = verify_tree(rows_of(p), p, tokens, chain, accept * 0.99, following, width=1, rule=rule)
    assert tree.num_accepted_B.tolist() == [3] * 200  # a draft that is the target


@chain_rules
def test_rows_with_fewer_drafts_are_verified_as_if_they_stood_alone(rule):
    p, q, tokens, accept, following = random_round(torch.Generator().manual_seed(0), 64, range(4))
    q, tokens, accept, few = q[:, 1:], tokens[:, 1:], accept[:, 1:], torch.full((64,), 2)
    short = rule(p, q, tokens, few, accept, following[:, 0], following[:, 1])
    alone = rule(p[:, :3], q[:, :2], tokens[:, :2], few, accept[:, :2], following[:, 0], following[:, 1])
    assert all(map(torch.equal, short, alone))


@st.composite
def trees(draw_value):
    """Give the parents of a random tree of up to 9 nodes, and its depth."""
    parents = [-1] + [draw_value(st.integers(0, node)) for node in range(draw_value(st.integers(0, 8)))]
    depths = [0]
    for above in parents[1:]:
        depths.append(depths[above] + 1)
    return parents, max(depths)


@settings(max_examples=25, deadline=None)
@given(tree=trees(), seed=st.integers(0, 1000))
def test_a_tree_without_a_draft_distribution_gives_the_very_tokens_of_plain_decoding(tree, seed):
    parents, depth = tree
    generator = torch.Generator().manual_seed(seed)
    p, _, tokens, *_ = random_round(generator, 3, parents, vocab_size=3)
    following = torch.rand(3, depth + 1, generator=generator, dtype=torch.float64)
    p_after = rows_of(p)
    verdict = match_tree(lambda node_B, level: draw(p_after(node_B), following[:, level]), tokens, torch.tensor(parents), depth)
    for row in range(3):
        node, drawn, path = 0, [], []
        for uniform in following[row]:
            drawn.append(int(draw(p[row, node], uniform)))
            matching = [child for child, above in enumerate(parents) if above == node and tokens[row, child] == drawn[-1]]
            if not matching:
                break
            path.append(node := matching[0])
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
    verify = partial(verify_tree, width=size, rule=CANDIDATE_RULES[name])
    together = verify(rows_of(p), q, tokens, padded, accept, following)
    for row, (parents, _) in enumerate(forest):
        own_p, *own, own_accept = (values[row : row + 1, : len(parents)] for values in (p, q, tokens, accept))
        alone = verify(rows_of(own_p), *own, torch.tensor(parents), own_accept, following[row : row + 1])
        assert torch.equal(together.path_BD[row], alone.path_BD[0])
        assert together.next_token_B[row] == alone.next_token_B[0]
        kept = alone.path_BD[0, : alone.num_accepted_B[0]].tolist()
        assert [parents[node] for node in kept] == [0, *kept][: len(kept)]

"""The rule a config comes to is proved for its shape, with the draws the draft makes; what does not fit together is found."""

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import DynamicTree, StaticTree
from eval.decoder import verifier as judging
from eval.decoder.tree_rules import CANDIDATE_RULES
from eval.lossless import rule_proof
from eval.lossless.rule_proof import check_rule, small_part
from eval.lossless.tree_enumeration import distinct, distribution_of_draws, independent
from heads.sampling.sibling_draws import DRAWS, draw_without_replacement
from heads.sampling.token_tree import Tree, tree_from

COMPARED = {"with_replacement": independent, "without_replacement": distinct, "k_seq": independent}


def sampled(**settings):
    return DecodeConfig(**{"temperature": 1.0, "num_speculative_tokens": 4} | settings)


def tree_of(candidates=None, branching=(2, 1)):
    return StaticTree(kind="static", branching=list(branching), candidates=candidates)


@pytest.mark.parametrize("name", ["token", "block"])
def test_a_chain_is_proved_at_its_length_up_to_three_drafts(name):
    for length, proved in ((1, [0]), (2, [0, 1]), (4, [0, 1, 2])):
        found = check_rule(sampled(verification=name, num_speculative_tokens=length))
        assert (found["outcome"], found["rule"], found["shape"]) == ("pass", name, "chain")
        assert (found["enumerated_parents"], found["toys"]) == (proved, 3)
        assert found["max_total_variation"] < 1e-12


@pytest.mark.parametrize("name", CANDIDATE_RULES)
def test_a_drawn_tree_is_proved_by_the_rule_for_its_candidates(name):
    found = check_rule(sampled(tree=tree_of(name)))
    assert (found["outcome"], found["rule"], found["shape"]) == ("pass", name, "static_tree")
    assert found["enumerated_parents"] == [0, 0, 1, 2]
    assert found["max_total_variation"] < 1e-12


@pytest.mark.parametrize(
    "settings",
    [
        {"verification": "match"},
        {"tree": tree_of("top_k")},
        {"tree": tree_of(), "verification": "match"},
        {"tree": DynamicTree(kind="dynamic")},
    ],
)
def test_matching_draws_the_targets_own_tokens_and_needs_no_toy(settings):
    found = check_rule(sampled(**settings))
    assert (found["outcome"], found["rule"], found["toys"]) == ("pass", "match", 0)


def test_the_part_of_a_tree_that_is_proved_is_wide_and_deep():
    tree = tree_from(tree_of("k_seq", (3, 2, 1)), 3)
    assert small_part(tree, 5) == Tree((0, 0, 0, 1, 1), "k_seq")
    assert small_part(tree, 99) == tree
    assert small_part(Tree((0, 1, 2, 3)), 3) == Tree((0, 1, 2))


@pytest.mark.parametrize("name", DRAWS)
def test_the_distribution_of_a_way_to_draw_siblings_is_the_known_one(name):
    distribution = distribution_of_draws(DRAWS[name])
    for q in ((0.2, 0.5, 0.3), (0.0, 0.25, 0.75)):
        for siblings in torch.cartesian_prod(*[torch.arange(3)] * 3).tolist():
            assert distribution(q, tuple(siblings)) == pytest.approx(COMPARED[name](q, siblings), abs=1e-15)


# --- planted bugs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["with_replacement", "k_seq"])
def test_candidates_drawn_in_another_way_than_the_rule_expects_fail(name, monkeypatch):
    monkeypatch.setitem(rule_proof.DRAWS, name, draw_without_replacement)
    found = check_rule(sampled(tree=tree_of(name)))
    assert (found["outcome"], found["rule"]) == ("fail", name)
    assert found["max_total_variation"] > 1e-3


def test_the_proof_runs_the_very_table_of_rules_that_the_decoder_looks_up():
    assert rule_proof.CANDIDATE_RULES is judging.CANDIDATE_RULES
    assert rule_proof.RULES is judging.RULES

"""Merged trees hold every way of each draft once, and decoding with several drafts gives the plain answer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import DynamicTree, StaticTree
from eval.decoder.decode import decode, generate
from heads.proposers.draft_lm import DraftLM
from heads.proposers.merged import MergedDrafts, merge
from heads.proposers.prompt_lookup import PromptLookup
from heads.sampling.token_tree import check_parents
from tests.support import family_checks as checks
from tests.support.decoding import head_proposer, requests_for

CHAINS = StaticTree(kind="static", branching=[1, 1, 1])
trees = st.integers(0, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 2), min_size=n, max_size=n), st.tuples(*(st.integers(-1, draft) for draft in range(n)))
    )
)


def ways(tokens, parents):
    found = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append(None if parent < 0 or found[parent] is None else (*found[parent], token))
    return [way for way in found[1:] if way is not None]


@given(st.lists(trees, min_size=2, max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_merged_tree_holds_the_ways_of_all_and_each_once(given_trees):
    tokens, parents = merge(given_trees)
    check_parents(parents)
    merged = ways(tokens, parents)
    assert len(set(merged)) == len(merged)
    assert set(merged) == {way for tree in given_trees for way in ways(*tree)}


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(checks.tiny_target("llama"))


@pytest.fixture
def drafts(target, tiny_llama):
    """Drafts of every kind: two models, of which one is the target, heads with and without trees of their own, lookup."""
    return {
        "model": DraftLM(tiny_llama(seed=2), 64),
        "itself": DraftLM(target.model, 64),
        **{name: head_proposer(name, target.model) for name in ("eagle3", "medusa", "peagle")},
        "lookup": PromptLookup(target.device),
    }


@pytest.mark.parametrize("tree", [CHAINS, DynamicTree(kind="dynamic", num_nodes=5, width=2)], ids=["chains", "grown"])
def test_several_drafts_at_once_give_the_plain_answer(target, drafts, tree):
    plain = generate(target, checks.PROMPTS, DecodeConfig(num_speculative_tokens=0, max_new_tokens=16, batch_size=3))
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=16, batch_size=3, tree=tree)
    assert generate(target, checks.PROMPTS, config, MergedDrafts(list(drafts.values()), target.device)) == plain


def test_the_better_draft_is_followed_wherever_it_stands_and_the_other_loses_nothing(target, drafts):
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=17, tree=CHAINS)
    both = MergedDrafts([drafts["model"], drafts["itself"]], target.device)
    generations, _ = decode(target, requests_for(checks.PROMPTS), config, both)
    assert all(round_.num_accepted == 3 for generation in generations for round_ in generation.rounds)
    assert any(round_.ranks[0] == 1 for generation in generations for round_ in generation.rounds)


def test_merging_at_a_temperature_is_matched_and_never_drawn(target, drafts):
    merged = MergedDrafts([drafts["model"], drafts["eagle3"]], target.device)
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12, batch_size=3, tree=CHAINS, temperature=1.0)
    plain = generate(target, checks.PROMPTS, config.model_copy(update={"num_speculative_tokens": 0}))
    assert generate(target, checks.PROMPTS, config.model_copy(update={"verification": "match"}), merged) == plain
    with pytest.raises(InputError, match="set verification to match"):
        generate(target, checks.PROMPTS, config, merged)
    with pytest.raises(InputError, match="set tree"):
        generate(target, checks.PROMPTS, config.model_copy(update={"tree": None}), merged)


def test_a_single_draft_is_nothing_to_merge():
    with pytest.raises(InputError, match="two drafts or more, got 1"):
        MergedDrafts([PromptLookup(torch.device("cpu"))], torch.device("cpu"))

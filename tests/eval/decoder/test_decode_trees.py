"""Decoding with trees gives what plain decoding gives, whatever the draft and the batch. Shapes: `test_decode_properties`."""

import pytest
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import DynamicTree, StaticTree
from eval.decoder.decode import decode, generate
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup
from tests.support import family_checks as checks
from tests.support.decoding import PROMPTS, head_proposer, requests_for

TREES = {
    "bushy": StaticTree(kind="static", branching=[3, 2, 1]),
    "uneven": StaticTree(kind="static", paths=[[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [0, 1, 0, 0]]),
    "grown": DynamicTree(kind="dynamic", num_nodes=9, width=3),
}


def with_tree(name, **others):
    return DecodeConfig(**({"num_speculative_tokens": 4, "max_new_tokens": 20, "tree": TREES[name]} | others))


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


@pytest.fixture(scope="module")
def draft(tiny_llama):
    return DraftLM(tiny_llama(seed=2), 64)


@pytest.mark.parametrize(("head", "tree"), [("medusa", "uneven"), ("hydra", "grown"), ("eagle3", "uneven"), ("mtp", "grown")])
def test_greedy_output_with_a_head_is_plain_in_a_target_with_a_sliding_window(as_target, head, tree):
    target = as_target(checks.tiny_target("gemma3"))
    plain = DecodeConfig(num_speculative_tokens=0, max_new_tokens=12, batch_size=3)
    config = with_tree(tree, max_new_tokens=12, batch_size=3)
    found = generate(target, checks.PROMPTS, config, head_proposer(head, target.model))
    assert found == generate(target, checks.PROMPTS, plain)


def test_a_perfect_draft_is_accepted_down_to_the_leaves_and_recorded_by_its_ranks(target):
    config = with_tree("bushy", num_speculative_tokens=3, max_new_tokens=17)
    generations, timing = decode(target, requests_for(PROMPTS), config, DraftLM(target.model, 64))
    for generation in generations:
        seen = [(round_.num_accepted, round_.ranks, round_.num_nodes) for round_ in generation.rounds]
        assert seen == [(3, (0, 0, 0), 15)] * 4
    assert timing.num_rounds == 4 * 4


@pytest.mark.parametrize("tree", ["uneven", "grown"])
def test_matched_trees_draw_the_very_tokens_of_plain_sampling(target, draft, tree):
    config = with_tree(tree, temperature=1.0, verification="match")
    plain, _ = decode(target, requests_for(PROMPTS), config)
    matched, _ = decode(target, requests_for(PROMPTS), config, draft)
    assert [generation.tokens for generation in matched] == [generation.tokens for generation in plain]


def test_a_draft_that_only_drafts_chains_is_refused(target):
    with pytest.raises(InputError, match="PromptLookup drafts chains only"):
        generate(target, PROMPTS, with_tree("bushy"), PromptLookup(target.device))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_speculative_tokens": 2}, "3 tokens deep, and num_speculative_tokens allows 2"),
        ({"stopping": {"rule": "confidence"}}, "stopping cuts chains only"),
    ],
)
def test_settings_that_do_not_go_with_a_tree_are_refused(change, reason):
    with pytest.raises(ValidationError, match=reason):
        with_tree("bushy", **change)
    assert with_tree("bushy", num_speculative_tokens=0).tree is not None

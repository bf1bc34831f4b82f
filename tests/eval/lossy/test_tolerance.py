"""Tolerant verification: its distribution is that of the draws it stands for, and lies no further from p than delta."""

import itertools

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from configs.schema.decoding import DecodeConfig, NeighboursConfig, TolerantAcceptance
from configs.schema.drafting import StaticTree
from eval.decoder.chain_rules import verify_block, verify_tokens
from eval.decoder.tree_rules import CANDIDATE_RULES, verify_tree
from eval.lossy.decode import decode
from eval.lossy.neighbourhood import step_candidates, step_rule, write_table
from eval.lossy.tolerance import tolerant
from heads.proposers.draft_lm import DraftLM
from heads.sampling.probabilities import DRAWS
from tests.support.decoding import requests_for
from tests.support.enumeration import distribution_of_draws, enumerate_rule, enumerate_tree, random_toy

NONE = torch.empty((0, 0), dtype=torch.int64)
RING = torch.tensor([[1], [2], [0], [3]])  # of 4 tokens, each of 3 passes for the one before it, and the last for none


def move(samples):
    return lambda p, q, near_VN, delta: tolerant(p, q, near_VN, delta, samples=samples)


def by_draws(p, q, near, samples):
    """The distribution of the token and the chance that the draft stays, over all that the target may draw."""
    tokens = range(len(p))
    residual = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    residual = [each / sum(residual) for each in residual]
    output, stays = [0.0] * len(p), 0.0
    for draft in tokens:
        refused = max(0.0, q[draft] - p[draft])
        saved = sum(
            residual[first] * np.prod([p[each] for each in others])
            for first in tokens
            for others in itertools.product(tokens, repeat=samples - 1)
            if {draft, *near[draft]} & {first, *others}
        )
        stays += q[draft] - refused * (1 - saved)
        output[draft] += q[draft] - refused * (1 - saved)
        for token in tokens:
            output[token] += refused * (1 - saved) * residual[token]
    return output, stays


@pytest.mark.parametrize("near_VN", [NONE, RING])
@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("looked_up", [False, True])
def test_the_distribution_is_that_of_the_draws(samples, near_VN, looked_up):
    near = near_VN.tolist() or [[]] * 4
    for seed in range(4):
        toy = random_toy(seed, 4, 1, looked_up=looked_up)
        p, q = toy.p[()], toy.q[()]
        expected, stays = by_draws(p, q, near, samples)
        got = tolerant(*(torch.tensor(each, dtype=torch.float64) for each in (p, q)), near_VN, 1.0, samples=samples)
        assert got.tolist() == pytest.approx(expected)
        found = enumerate_rule(step_rule(verify_tokens, near_VN, 1.0, move(samples)), toy)
        assert found.tokens_per_round == pytest.approx(1 + stays)
        if looked_up and near_VN is NONE:
            assert stays == pytest.approx(1 - (1 - p[q.index(1.0)]) ** samples)


@pytest.mark.parametrize("delta", [0.0, 0.3])
@pytest.mark.parametrize("looked_up", [False, True])
def test_no_steps_distribution_lies_further_than_delta_from_the_targets(delta, looked_up):
    furthest = 0.0
    for seed, strict in enumerate((verify_block, verify_tokens)):
        toy = random_toy(seed, 4, 2, looked_up=looked_up)
        found, lossless = (enumerate_rule(rule, toy) for rule in (step_rule(strict, RING, delta, move(3)), strict))
        assert found.total_variation <= 1 - (1 - delta) ** 2 + 1e-12
        assert found.tokens_per_round >= lossless.tokens_per_round - 1e-12
        furthest = max(furthest, found.total_variation)
        alone = enumerate_rule(step_rule(strict, NONE, 1.0, move(1)), toy)
        assert alone.total_variation < 1e-12  # one draw, and nothing that passes for another: no loss
    assert (furthest > 0.04) == (delta > 0)


@pytest.mark.parametrize("name", CANDIDATE_RULES)
def test_the_same_holds_for_siblings_of_a_tree(name):
    for seed, delta in enumerate((0.0, 0.1, 0.4)):
        rule = step_candidates(CANDIDATE_RULES[name], RING, delta, move(2))

        def verify(*values, rule=rule, **settings):
            return verify_tree(*values, **settings, rule=rule)

        found = enumerate_tree(verify, random_toy(seed, 4, 1), [-1, 0, 0], distribution_of_draws(DRAWS[name]))
        assert found.total_variation <= delta + 1e-10


# --- in the decoder -----------------------------------------------------------------------------------------------


def rounds(target, draft, **lossy):
    tree = lossy.pop("tree", None)
    lossy = TolerantAcceptance(kind="tolerance", **lossy) if lossy else None
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, temperature=2.5, lossy=lossy, batch_size=3, tree=tree)
    return [each.rounds for each in decode(target, requests_for([(7, 12, 3), (20, 9, 9), (40,)] * 2), config, draft)[0]]


def test_more_draws_and_near_codes_keep_more_drafts(tiny_llama, as_target, tmp_path):
    target, draft = as_target(tiny_llama(seed=1)), DraftLM(tiny_llama(seed=2, spread=3.0), 64)
    np.save(tmp_path / "codes.npy", np.random.default_rng(0).normal(size=(64, 3)))
    table = str(tmp_path / "table.safetensors")
    write_table(NeighboursConfig(codebook=str(tmp_path / "codes.npy"), vocab_size=64, k=16, output=table))
    strict = rounds(target, draft)
    assert rounds(target, draft, samples=1) == rounds(target, draft, samples=9, delta=0.0) == strict
    for others in ({}, {"drafts": "likeliest"}, {"tree": StaticTree(kind="static", branching=[2, 2, 1])}):
        one, many, near = (
            sum(map(len, rounds(target, draft, **others, **each)))
            for each in ({"samples": 1}, {"samples": 9}, {"samples": 9, "k": 16, "table": table})
        )
        assert near < many < one, others


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValidationError, match=r"set a table by eval/neighbours\.py"):
        TolerantAcceptance(kind="tolerance", k=3)
    likeliest = TolerantAcceptance(kind="tolerance", drafts="likeliest")
    with pytest.raises(ValidationError, match=r"lossy\.drafts to drawn"):
        DecodeConfig(temperature=1.0, lossy=likeliest, tree=StaticTree(kind="static", branching=[2]))

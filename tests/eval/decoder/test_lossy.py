"""Lossy rules do what their papers say, lie no further from the target than they may, are flagged, and leave the rest alone."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.decoding import (
    DecodeConfig,
    NeighbourhoodAcceptance,
    ParticleSampling,
    StaticTree,
    TypicalAcceptance,
)
from configs.schema.evaluation import EvalConfig
from eval.decoder import lossy as lossy_rules
from eval.decoder.decode import decode
from eval.decoder.lossy import (
    neighbours,
    relaxed,
    relaxed_candidates,
    relaxed_chain,
    typical_threshold,
    verify_typical,
    verify_typical_tree,
)
from eval.decoder.rules import CANDIDATE_RULES, match_tree, verify_block, verify_greedy, verify_tokens, verify_tree
from heads.proposers.draft_lm import DraftLM
from heads.sampling.draws import token_probabilities
from tests.support.decoding import assert_same_alone, requests_for
from tests.support.enumeration import SIBLINGS, enumerate_rule, enumerate_tree, random_toy, tokens_of

PROMPTS = [(7, 12, 3), (20, 9, 9, 31, 5, 6), (40,)]
TREES = {
    "chain": None,
    "static": StaticTree(kind="static", branching=[3, 2, 1]),
}
TYPICAL = TypicalAcceptance(kind="typical")
RING = torch.tensor([[1], [2], [0], [3]])  # of 4 tokens, each of 3 passes for the one before it, and the last for none


# --- typical acceptance -------------------------------------------------------------------------------------------


def is_plausible(p_V, token):
    entropy = -sum(p * math.log(p) for p in p_V if p > 0)
    return p_V[token] > min(TYPICAL.epsilon, TYPICAL.delta * math.exp(-entropy))


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
    generator = torch.Generator().manual_seed(seed)
    p_BNV = (2 * torch.randn(3, len(parents), 4, generator=generator, dtype=torch.float64)).softmax(-1)
    tokens_BN = torch.randint(4, (3, len(parents)), generator=generator)
    verdict = verify_typical_tree(p_BNV, tokens_BN, torch.tensor(parents), len(parents) - 1, TYPICAL)
    for row in range(3):
        path = naive_path(p_BNV[row].tolist(), tokens_BN[row].tolist(), parents)
        assert verdict.path_BD[row].tolist() == path + [-1] * (len(parents) - 1 - len(path))
        assert verdict.num_accepted_B[row] == len(path)
        assert verdict.next_token_B[row] == p_BNV[row, path[-1] if path else 0].argmax()


def test_typical_acceptance_is_greedy_at_temperature_0_and_lossy_above():
    generator = torch.Generator().manual_seed(0)
    target_BN, tokens_BN = torch.randint(3, (2, 50, 6), generator=generator)
    p_BNV = torch.nn.functional.one_hot(target_BN, 3).double()
    parents_N = torch.tensor([-1, 0, 1, 1, 3, 2])
    tokens_BN[:, 3] = (tokens_BN[:, 2] + 1) % 3  # siblings that differ
    tree, greedy_tree = (
        verify_typical_tree(p_BNV, tokens_BN, parents_N, 3, TYPICAL),
        match_tree(tokens_of(target_BN), tokens_BN, parents_N, 3),
    )
    count_B = torch.arange(50) % 6  # never more than were drafted
    chain, greedy = (
        verify_typical(p_BNV, tokens_BN[:, 1:], count_B, TYPICAL),
        verify_greedy(target_BN, tokens_BN[:, 1:], count_B),
    )
    assert all(map(torch.equal, (*tree, *chain), (*greedy_tree, *greedy)))
    outcome = enumerate_rule(lambda p, q, tokens, count, *_: verify_typical(p, tokens, count, TYPICAL), random_toy(0))
    assert outcome.total_variation > 0.1


# --- relaxed acceptance -------------------------------------------------------------------------------------------


@pytest.fixture
def ring(monkeypatch):
    """A function that relaxes by `RING`, whatever the codebook."""
    monkeypatch.setattr(lossy_rules, "neighbours", lambda lossy, vocab_size, device: RING[:vocab_size])
    return lambda delta: near("", delta)


@pytest.mark.parametrize("looked_up", [False, True])
def test_no_step_of_a_chain_moves_the_output_further_than_delta(looked_up, ring):
    for (seed, strict), delta in itertools.product(enumerate((verify_block, verify_tokens)), (0.0, 0.3, 1.0)):
        toy = random_toy(seed, 4, 2, looked_up=looked_up)
        found, lossless = (enumerate_rule(rule, toy) for rule in (relaxed_chain(strict, ring(delta)), strict))
        assert found.total_variation <= 1 - (1 - delta) ** 2 + 1e-12
        assert found.tokens_per_round >= lossless.tokens_per_round - 1e-12
    assert found.total_variation > 0.04
    assert found.tokens_per_round > lossless.tokens_per_round + 0.04


@pytest.mark.parametrize("name", CANDIDATE_RULES)
def test_the_same_holds_for_each_step_down_a_tree(name, ring):
    """At a leaf nothing is moved, nor once no sibling stays: that would be a further step."""
    for delta in (0.0, 0.1):
        verify = partial(verify_tree, rule=relaxed_candidates(CANDIDATE_RULES[name], ring(delta)))
        found = enumerate_tree(verify, random_toy(1, 3, 2), [-1, 0, 0, 1, 1], SIBLINGS[name])
        assert found.total_variation <= 1 - (1 - delta) ** 2 + 1e-12
    assert found.total_variation > 0.04


def test_what_is_moved_is_what_neighbours_can_give_and_never_more_than_delta():
    p, q = torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    near = torch.tensor([[1], [0], [0], [0]])  # tokens 2 and 3 share token 0; token 1 could give 0.1 and is nobody's
    torch.testing.assert_close(relaxed(p, q, near, 1.0), torch.tensor([0.1, 0.3, 0.26, 0.34], dtype=torch.float64))
    torch.testing.assert_close(relaxed(p, q, near, 0.2), torch.tensor([0.3, 0.3, 0.18, 0.22], dtype=torch.float64))
    itself = torch.arange(4).unsqueeze(1)
    assert torch.equal(relaxed(p, q, itself, 1.0), p)


# --- in the decoder -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def codebook(tmp_path_factory):
    path = tmp_path_factory.mktemp("codes") / "codes.npy"
    np.save(path, np.random.default_rng(0).normal(size=(64, 3)))
    return str(path)


def sampled(lossy, **others):
    return DecodeConfig(**{"num_speculative_tokens": 3, "max_new_tokens": 14, "temperature": 0.7, "lossy": lossy} | others)


def near(codebook, delta, **others):
    return NeighbourhoodAcceptance(kind="neighbourhood", **{"delta": delta, "codebook": codebook, "k": 16} | others)


@pytest.mark.parametrize("tree", TREES)
@torch.no_grad()
def test_every_kept_draft_is_plausible_and_the_target_adds_its_likeliest(target, draft, tree):
    config = sampled(TYPICAL, tree=TREES[tree])
    generations, _ = decode(target, requests_for(PROMPTS), config, draft)
    for generation in generations:
        text = [*generation.prompt_tokens, generation.tokens[0]]
        for round_ in generation.rounds:
            for place, token in enumerate(round_.committed):
                probs_V = token_probabilities(target.model(torch.tensor([text])).logits[0, -1], config)
                if place < round_.num_accepted:
                    assert probs_V[token] > typical_threshold(probs_V, TYPICAL)
                else:
                    assert token == probs_V.argmax()
                text.append(token)
    assert sum(round_.num_accepted for generation in generations for round_ in generation.rounds) > 0


@pytest.mark.parametrize("kind", ["typical", "smc", "neighbourhood"])
def test_a_request_gets_the_same_tokens_in_any_batch(target, draft, codebook, kind):
    lossy = {"smc": ParticleSampling(kind="smc", num_particles=3), "neighbourhood": near(codebook, 0.4)}.get(kind, TYPICAL)
    assert_same_alone(target, sampled(lossy), draft, PROMPTS)


def rounds(target, draft, lossy, tree=None, verification=None):
    config = sampled(lossy, max_new_tokens=24, temperature=2.5, tree=tree, verification=verification)
    return [each.rounds for each in decode(target, requests_for(PROMPTS * 2), config, draft)[0]]


@pytest.mark.parametrize("tree", [None, StaticTree(kind="static", branching=[2, 2, 1])])
def test_delta_0_is_lossless_to_the_bit_and_more_delta_keeps_more(target, tiny_llama, codebook, tree):
    draft = DraftLM(tiny_llama(seed=2, spread=3.0), 64)
    strict = rounds(target, draft, None, tree, verification=None if tree else "block")
    assert rounds(target, draft, near(codebook, 0), tree) == strict
    assert sum(map(len, rounds(target, draft, near(codebook, 0.5), tree))) < sum(map(len, strict))


def test_neighbours_are_the_nearest_codes_and_tokens_that_are_none_name_themselves(tmp_path):
    np.save(tmp_path / "codes.npy", np.array([[0.0], [1.0], [3.0], [3.5]]))
    lossy = near(str(tmp_path / "codes.npy"), 0.1, first_id=2, k=2)
    assert neighbours(lossy, 7, torch.device("cpu")).tolist() == [[0, 0], [1, 1], [3, 4], [2, 4], [5, 3], [4, 3], [6, 6]]
    for change, key in (({"first_id": 5}, "codebook"), ({"k": 4}, "k"), ({"codebook": "x"}, "codebook")):
        with pytest.raises(InputError, match=f"decode.lossy.{key}"):
            neighbours(lossy.model_copy(update=change), 7, torch.device("cpu"))


def test_answers_that_nothing_judges_are_refused():
    with pytest.raises(ValidationError, match="quality"):
        EvalConfig(decode=sampled(TYPICAL))


# --- the flag -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lossy", [TYPICAL, ParticleSampling(kind="smc", num_particles=2)])
def test_plain_decoding_beside_a_lossy_mode_stays_lossless(target, draft, lossy):
    beside, plain, changed = (
        [each.tokens for each in decode(target, requests_for(PROMPTS), sampled(mode), proposer)[0]]
        for mode, proposer in ((lossy, None), (None, None), (lossy, draft))
    )
    assert beside == plain != changed

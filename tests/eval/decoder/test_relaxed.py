"""Relaxed acceptance: what the output's distance from the target comes to, exactly, and the table it goes by."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, NeighbourhoodAcceptance, NeighboursConfig, TolerantAcceptance
from configs.schema.drafting import DynamicTree, StaticTree
from eval.decoder.chain_rules import verify_block, verify_tokens
from eval.decoder.decode import decode
from eval.decoder.relaxed import TENSOR, relaxed, step_candidates, step_rule, tolerant, write_table
from eval.decoder.tree_rules import CANDIDATE_RULES, verify_tree
from heads.proposers.draft_lm import DraftLM
from heads.sampling.probabilities import DRAWS
from tests.support.decoding import requests_for
from tests.support.enumeration import distribution_of_draws, enumerate_rule, enumerate_tree, random_toy

PROMPTS = [(7, 12, 3), (20, 9, 9, 31, 5, 6), (40,)]
DELTAS = (0.0, 0.3, 1.0)


def table_of(vocab_size, k, seed=0):
    """Each token's neighbours, in random order."""
    generator = torch.Generator().manual_seed(seed)
    others = [[other for other in range(vocab_size) if other != token] for token in range(vocab_size)]
    return torch.tensor([[row[n] for n in torch.randperm(len(row), generator=generator)[:k]] for row in others])


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(8, 1), (4, 2)])
def test_no_steps_distribution_lies_further_than_delta_from_the_targets(vocab_size, num_drafts, delta):
    near = table_of(vocab_size, 3)
    toy = random_toy(0, vocab_size, num_drafts)
    for strict in (verify_block, verify_tokens):
        found, lossless = (enumerate_rule(rule, toy) for rule in (step_rule(strict, near, delta), strict))
        assert found.total_variation <= 1 - (1 - delta) ** num_drafts + 1e-12
        assert found.tokens_per_round >= lossless.tokens_per_round - 1e-12
    if delta == 0.3:
        assert found.total_variation > 0.1
        assert found.tokens_per_round > lossless.tokens_per_round + 0.1


@pytest.mark.parametrize("move", [relaxed, partial(tolerant, samples=2)], ids=["neighbourhood", "tolerance"])
@pytest.mark.parametrize("name", CANDIDATE_RULES)
def test_the_same_holds_for_siblings_of_a_tree(name, move):
    for seed, delta in enumerate((0.0, 0.3)):
        rule = step_candidates(CANDIDATE_RULES[name], table_of(4, 2), delta, move)

        def verify(*values, rule=rule, **settings):
            return verify_tree(*values, **settings, rule=rule)

        found = enumerate_tree(verify, random_toy(seed, 4, 1), [-1, 0, 0], distribution_of_draws(DRAWS[name]))
        assert found.total_variation <= delta + 1e-10


def test_what_is_moved_is_what_neighbours_can_give_and_never_more_than_delta():
    p, q = torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    near = torch.tensor([[1], [0], [0], [0]])  # tokens 2 and 3 share token 0; token 1 could give 0.1 and is nobody's
    torch.testing.assert_close(relaxed(p, q, near, 1.0), torch.tensor([0.1, 0.3, 0.26, 0.34], dtype=torch.float64))
    torch.testing.assert_close(relaxed(p, q, near, 0.2), torch.tensor([0.3, 0.3, 0.18, 0.22], dtype=torch.float64))
    itself = torch.arange(4).unsqueeze(1)
    assert torch.equal(relaxed(p, q, itself, 1.0), p)


# --- in the decoder -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


@pytest.fixture
def draft(tiny_llama):
    return DraftLM(tiny_llama(seed=2, spread=3.0), 64)


@pytest.fixture
def table(tmp_path):
    np.save(tmp_path / "codes.npy", np.random.default_rng(0).normal(size=(64, 3)))
    path = tmp_path / "table.safetensors"
    write_table(NeighboursConfig(codebook=str(tmp_path / "codes.npy"), vocab_size=64, k=16, output=str(path)))
    return str(path)


def sampled(table, delta, **others):
    lossy = None if delta is None else {"kind": "neighbourhood", "delta": delta, "table": table, "k": 16}
    tree = others.pop("tree", None)
    lossy = lossy and NeighbourhoodAcceptance.model_validate(lossy)
    return DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, temperature=2.5, lossy=lossy, tree=tree, batch_size=3)


@pytest.mark.parametrize("tree", [None, StaticTree(kind="static", branching=[2, 2, 1])])
def test_delta_0_is_lossless_to_the_bit_and_more_keeps_more(target, draft, table, tree):
    answers = {
        delta: decode(target, requests_for(PROMPTS * 2), sampled(table, delta, tree=tree), draft)[0] for delta in (None, 0, 0.5)
    }
    assert [each.rounds for each in answers[0]] == [each.rounds for each in answers[None]]
    rounds = {delta: sum(len(each.rounds) for each in rows) for delta, rows in answers.items()}
    assert rounds[0.5] < rounds[0]


def test_a_request_gets_the_same_tokens_in_any_batch(target, draft, table):
    config = sampled(table, 0.4)
    together, _ = decode(target, requests_for(PROMPTS), config, draft)
    alone = [decode(target, [request], config, draft)[0][0] for request in requests_for(PROMPTS)]
    assert [each.tokens for each in together] == [each.tokens for each in alone]


def test_the_table_names_the_nearest_codes_and_tokens_that_are_none_name_themselves(tmp_path):
    np.save(tmp_path / "codes.npy", np.array([[0.0], [1.0], [3.0], [3.5]]))
    config = NeighboursConfig(codebook=str(tmp_path / "codes.npy"), first_id=2, vocab_size=7, k=2, output=str(tmp_path / "t"))
    write_table(config)
    table = load_file(tmp_path / "t")[TENSOR].tolist()
    assert table == [[0, 0], [1, 1], [3, 4], [2, 4], [5, 3], [4, 3], [6, 6]]
    for change, said in (({"vocab_size": 5}, "do not fit"), ({"k": 4}, "less than"), ({"codebook": "x"}, "no vectors")):
        with pytest.raises(InputError, match=said):
            write_table(config.model_copy(update=change))


def test_what_does_not_fit_is_refused(target, draft, table, tmp_path):
    request = requests_for(PROMPTS[:1])
    with pytest.raises(InputError, match=r"holds no table of neighbours.*eval/neighbours\.py"):
        decode(target, request, sampled(str(tmp_path / "none"), 0.1), draft)
    with pytest.raises(ValidationError, match="drafts that were drawn"):
        sampled(table, 0.1, tree=DynamicTree(kind="dynamic"))


# --- tolerance ----------------------------------------------------------------------------------------------------


NONE = torch.empty((0, 0), dtype=torch.int64)
RING = torch.tensor([[1], [2], [0], [3]])  # of 4 tokens, each of 3 passes for the one before it, and the last for none


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
def test_tolerance_has_the_distribution_of_the_draws(samples, near_VN, looked_up):
    near = near_VN.tolist() or [[]] * 4
    for seed in range(4):
        toy = random_toy(seed, 4, 1, looked_up=looked_up)
        p, q = toy.p[()], toy.q[()]
        expected, stays = by_draws(p, q, near, samples)
        got = tolerant(*(torch.tensor(each, dtype=torch.float64) for each in (p, q)), near_VN, 1.0, samples=samples)
        assert got.tolist() == pytest.approx(expected)
        found = enumerate_rule(step_rule(verify_tokens, near_VN, 1.0, partial(tolerant, samples=samples)), toy)
        assert found.tokens_per_round == pytest.approx(1 + stays)
        if looked_up and near_VN is NONE:
            assert stays == pytest.approx(1 - (1 - p[q.index(1.0)]) ** samples)


@pytest.mark.parametrize("delta", [0.0, 0.3])
@pytest.mark.parametrize("looked_up", [False, True])
def test_tolerance_moves_no_more_than_delta(delta, looked_up):
    furthest = 0.0
    for seed, strict in enumerate((verify_block, verify_tokens)):
        toy = random_toy(seed, 4, 2, looked_up=looked_up)
        found, lossless = (
            enumerate_rule(rule, toy) for rule in (step_rule(strict, RING, delta, partial(tolerant, samples=3)), strict)
        )
        assert found.total_variation <= 1 - (1 - delta) ** 2 + 1e-12
        assert found.tokens_per_round >= lossless.tokens_per_round - 1e-12
        furthest = max(furthest, found.total_variation)
        alone = enumerate_rule(step_rule(strict, NONE, 1.0, partial(tolerant, samples=1)), toy)
        assert alone.total_variation < 1e-12  # one draw, and nothing that passes for another: no loss
    assert (furthest > 0.04) == (delta > 0)


def rounds(target, draft, **lossy):
    tree = lossy.pop("tree", None)
    lossy = TolerantAcceptance(kind="tolerance", **lossy) if lossy else None
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, temperature=2.5, lossy=lossy, batch_size=3, tree=tree)
    return [each.rounds for each in decode(target, requests_for([(7, 12, 3), (20, 9, 9), (40,)] * 2), config, draft)[0]]


def test_more_draws_and_near_codes_keep_more_drafts(target, draft, table):
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

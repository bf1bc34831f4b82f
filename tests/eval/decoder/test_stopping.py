"""Rounds of a length that the draft's own distributions decide are lossless, by exact enumeration and through the decoder."""

import copy

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import ConfidenceStopping
from eval.decoder.decode import decode, generate
from eval.decoder.rules import verify_block, verify_tokens
from heads.proposers.chain_builder import ChainBuilder
from heads.proposers.draft_lm import DraftLM
from heads.proposers.protocol import RoundInputs
from heads.sampling.counter_rng import CounterRNG
from tests.support import family_checks
from tests.support.decoding import PROMPTS, assert_same_alone, head_proposer, requests_for
from tests.support.enumeration import enumerate_rule, random_toy

RULES = {"token": verify_tokens, "block": verify_block}
BY_DISTRIBUTION = ConfidenceStopping(rule="confidence", threshold=0.7)
BY_ESTIMATE = ConfidenceStopping(rule="confidence", threshold=0.4, by="estimate")


def lengths(stopping, logits_BGV, estimates_BG=None):
    """How many tokens each row drafts when its distributions, or the draft's estimates, are these."""
    B, G = logits_BGV.shape[:2]
    config = DecodeConfig(num_speculative_tokens=G, stopping=stopping)
    inputs = RoundInputs.of([[0]] * B, CounterRNG(0, range(B), torch.device("cpu")))
    chain = ChainBuilder(inputs, config, None, keep_logits=False)
    for place in range(G):
        chain.add(logits_BGV[:, place], None if estimates_BG is None else estimates_BG[:, place])
    return torch.tensor(chain.proposal().num_drafted.host)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_output_follows_the_targets_distribution_exactly_for_any_length(rule):
    seen = set()

    def stopped(p, q, tokens, num_drafted, accept, residual, bonus):
        num_drafted = lengths(BY_DISTRIBUTION, q.log())
        seen.update(num_drafted.tolist())
        return rule(p, q, tokens, num_drafted, accept, residual, bonus)

    assert max(enumerate_rule(stopped, random_toy(seed)).total_variation for seed in range(3)) < 1e-12
    assert len(seen) > 1


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_estimate_may_depend_on_the_tokens_before(rule):
    seen = set()

    def stopped(p, q, tokens, num_drafted, accept, residual, bonus):
        # Of position i from the tokens before it, whose number is i.
        said = [0.95 - (tokens[:, :i] * torch.arange(3, 3 + i)).sum(1) % 5 / 5 for i in range(tokens.shape[1])]
        num_drafted = lengths(BY_ESTIMATE, q.log(), torch.stack(said, 1))
        seen.update(num_drafted.tolist())
        return rule(p, q, tokens, num_drafted, accept, residual, bonus)

    assert max(enumerate_rule(stopped, random_toy(seed)).total_variation for seed in range(2)) < 1e-12
    assert len(seen) > 1


@torch.no_grad()
def test_a_head_stops_by_its_own_estimate(as_target):
    target = as_target(family_checks.tiny_target("llama"))
    stopping = ConfidenceStopping(rule="confidence", threshold=0.5, by="estimate")
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, stopping=stopping)
    generations, _ = decode(target, requests_for(PROMPTS), config, head_proposer("dspark", target.model), measure_overlap=True)
    assert {len(round_.drafted) for generation in generations for round_ in generation.rounds} > {1}
    with pytest.raises(InputError, match="this draft makes no estimate"):
        decode(target, requests_for(PROMPTS), config, head_proposer("dflash", target.model))


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    """A target that is sometimes sure and sometimes not."""
    model = tiny_llama(seed=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(12.0)
    return as_target(model)


@pytest.fixture(scope="module")
def draft(target):
    """The target with noise, so that it is often right."""
    model = copy.deepcopy(target.model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    return DraftLM(model, 64)


def test_greedy_output_is_plain_and_records_show_how_many_tokens_each_round_drafted(target, draft):
    config = DecodeConfig(num_speculative_tokens=5, max_new_tokens=40, stopping=BY_DISTRIBUTION)
    generations, _ = decode(target, requests_for(PROMPTS), config, draft, measure_overlap=True)
    plain = generate(target, PROMPTS, DecodeConfig(num_speculative_tokens=0, max_new_tokens=40))
    assert [list(generation.tokens) for generation in generations] == plain
    rounds = [round_ for generation in generations for round_ in generation.rounds]
    assert len({len(round_.drafted) for round_ in rounds}) > 1
    assert any(round_.num_accepted == len(round_.drafted) > 0 for round_ in rounds)
    assert all(len(round_.overlap or ()) == min(round_.num_accepted + 1, len(round_.drafted)) for round_ in rounds)
    assert_same_alone(target, config.model_copy(update={"temperature": 1.0, "max_new_tokens": 16}), draft)

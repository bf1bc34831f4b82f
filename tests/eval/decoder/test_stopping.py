"""Rounds of a length that the draft's own distributions decide are lossless, by exact enumeration and through the decoder."""

import copy

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import ConfidenceStopping, CostStopping, EntropyStopping
from eval.decoder.decode import decode, generate
from eval.decoder.rules import verify_block, verify_tokens
from heads.proposers.chain_builder import ChainBuilder, rule_for
from heads.proposers.draft_lm import DraftLM
from heads.sampling.counter_rng import CounterRNG
from tests.support import family_checks
from tests.support.decoding import PROMPTS, assert_same_alone, head_proposer, requests_for
from tests.support.enumeration import enumerate_rule, random_toy

RULES = {"token": verify_tokens, "block": verify_block}
STOPPING = {
    "confidence": ConfidenceStopping(rule="confidence", threshold=0.7),
    "entropy": EntropyStopping(rule="entropy", threshold=0.7),
    "cost": CostStopping(
        rule="cost",
        draft_step_milliseconds=2.0,
        target_step_milliseconds=[10.0, 11.0, 12.0, 13.0, 14.0, 15.0],
        acceptance=0.5,
    ),
    "cost_of_dear_rows": CostStopping(
        rule="cost",
        draft_step_milliseconds=0.0,
        target_step_milliseconds=[10.0, 16.0, 22.0, 28.0, 34.0, 40.0],
        acceptance=0.8,
        tokens_per_second=110.0,
    ),
}
stopping_rules = pytest.mark.parametrize("name", STOPPING)


def lengths(stopping, q_BGV):
    """How many tokens each row drafts when its distributions are these."""
    rule = rule_for(DecodeConfig(num_speculative_tokens=q_BGV.shape[1], stopping=stopping))
    still_B, num_drafted_B = torch.ones(len(q_BGV), dtype=torch.bool), torch.zeros(len(q_BGV), dtype=torch.int64)
    for probs_BV in q_BGV.unbind(1):
        decision = rule.decide(probs_BV)
        num_drafted_B += still_B & decision.drafts_B
        still_B &= decision.continues_B
    return num_drafted_B


@stopping_rules
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_output_follows_the_targets_distribution_exactly_for_any_length(rule, name):
    seen = set()

    def stopped(p, q, tokens, num_drafted, accept, residual, bonus):
        num_drafted = lengths(STOPPING[name], q)
        seen.update(num_drafted.tolist())
        return rule(p, q, tokens, num_drafted, accept, residual, bonus)

    assert max(enumerate_rule(stopped, random_toy(seed)).total_variation for seed in range(3)) < 1e-12
    assert len(seen) > 1
    assert (0 in seen) is ("dear" in name)


ESTIMATES = {name: STOPPING[name].model_copy(update={"by": "estimate"}) for name in ("confidence", "cost", "cost_of_dear_rows")}


def own_lengths(stopping, tokens_BG, tokens_seen):
    """How many tokens each row drafts when the draft's estimate is a function of the first tokens of its draft."""
    config = DecodeConfig(num_speculative_tokens=tokens_BG.shape[1], stopping=stopping)
    chain = ChainBuilder(
        [1] * len(tokens_BG),
        config,
        CounterRNG(0, range(len(tokens_BG)), torch.device("cpu")),
        None,
        keep_logits=False,
    )
    for position in range(tokens_BG.shape[1]):
        seen_BS = tokens_BG[:, : position + tokens_seen]
        said_B = 0.95 - (seen_BS * torch.arange(3, 3 + seen_BS.shape[1])).sum(1) % 5 / 5
        chain.add(torch.zeros(len(tokens_BG), 2), said_B)
    return torch.tensor(list(chain.proposal().num_drafted))


@pytest.mark.parametrize("name", ESTIMATES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_estimate_may_depend_on_the_tokens_before_and_not_on_the_one_it_is_of(rule, name):
    seen = set()

    def far(tokens_seen):
        def stopped(p, q, tokens, num_drafted, accept, residual, bonus):
            num_drafted = own_lengths(ESTIMATES[name], tokens, tokens_seen)
            seen.update(num_drafted.tolist())
            return rule(p, q, tokens, num_drafted, accept, residual, bonus)

        return max(enumerate_rule(stopped, random_toy(seed)).total_variation for seed in range(2))

    assert far(0) < 1e-12
    assert len(seen) > 1
    if name == "cost_of_dear_rows":  # which drops tokens that were drawn
        assert far(1) > 1e-3


@torch.no_grad()
def test_a_head_stops_by_its_own_estimate_which_is_recorded(as_target):
    target = as_target(family_checks.tiny_target("llama"))
    stopping = ConfidenceStopping(rule="confidence", threshold=0.5, by="estimate")
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, stopping=stopping)
    generations, _ = decode(target, requests_for(PROMPTS), config, head_proposer("dspark", target.model), measure_overlap=True)
    rounds = [round_ for generation in generations for round_ in generation.rounds if round_.distributions is not None]
    assert {len(round_.drafted) for round_ in rounds} > {1}
    for round_ in rounds:
        estimate = round_.distributions.estimate
        assert len(estimate) == len(round_.overlap)
        stops = [place for place, said in enumerate(estimate) if said < 0.5]
        assert not stops or len(round_.drafted) <= stops[0] + 1
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


@stopping_rules
def test_greedy_output_is_plain_and_records_show_how_many_tokens_each_round_drafted(target, draft, name):
    config = DecodeConfig(num_speculative_tokens=5, max_new_tokens=40, stopping=STOPPING[name])
    generations, _ = decode(target, requests_for(PROMPTS), config, draft, measure_overlap=True)
    plain = generate(target, PROMPTS, DecodeConfig(num_speculative_tokens=0, max_new_tokens=40))
    assert [list(generation.tokens) for generation in generations] == plain
    rounds = [round_ for generation in generations for round_ in generation.rounds]
    assert len({len(round_.drafted) for round_ in rounds}) > 1
    assert any(round_.num_accepted == len(round_.drafted) > 0 for round_ in rounds)
    assert any(not round_.drafted for generation in generations for round_ in generation.rounds[:-1]) is ("dear" in name)
    assert all(len(round_.overlap or ()) == min(round_.num_accepted + 1, len(round_.drafted)) for round_ in rounds)
    assert_same_alone(target, config.model_copy(update={"temperature": 1.0, "max_new_tokens": 16}), draft)

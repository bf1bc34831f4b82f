"""Classifier-free guidance: plain and speculative decoding follow the mixed logits of two forwards, and nothing else does."""

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import StaticTree
from configs.schema.target import GuidanceConfig
from eval.decoder.decode import generate
from eval.decoder.request import Request
from heads.inference.runner import Guidance, runner_of
from heads.proposers.draft_lm import DraftLM
from heads.sampling.counter_rng import CounterRNG, Role
from heads.sampling.probabilities import draw, token_probabilities
from tests.support.decoding import head_proposer

GUIDANCE = GuidanceConfig(scale=2.5, condition=[8, 10], null=11)
END = 4  # rows end at different rounds
PROMPTS = [[8, 1], [9], [10, 3, 3, 7, 1], [9, 8, 2]]
CHAIN = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12, batch_size=4)
TREE = CHAIN.model_copy(update={"tree": StaticTree(kind="static", branching=[2, 2, 1])})


@pytest.fixture
def guided(tiny_llama, as_target):
    """A target of 12 tokens with guidance."""
    target = as_target(tiny_llama(seed=5, vocab_size=12, layers=4, spread=4.0), eos=(END,))
    runner_of(target.model).guidance = Guidance.of(target.model, GUIDANCE)
    return target


@pytest.fixture
def draft(tiny_llama):
    return DraftLM(tiny_llama(seed=5, vocab_size=12, layers=4, spread=3.7), 12)


@torch.no_grad()
def naive_logits(model, ids_BT, config=GUIDANCE):
    """The logits of two whole forwards, mixed."""
    with runner_of(model).unguided():
        cond, uncond = (model(input_ids=torch.tensor(ids)).logits for ids in (ids_BT, [replaced(row) for row in ids_BT]))
    return uncond + config.scale * (cond - uncond)


def replaced(row):
    return [11 if 8 <= token <= 10 else token for token in row]


def naively(model, prompt, choose):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + 12 and END not in tokens[len(prompt) :]:
        tokens.append(int(choose(naive_logits(model, [tokens])[0, -1], len(tokens))))
    return tokens[len(prompt) :]


def test_greedy_tokens_are_those_of_the_mixed_logits_however_they_are_drafted(guided, draft):
    expected = [naively(guided.model, prompt, lambda logits, _: logits.argmax()) for prompt in PROMPTS]
    assert len({len(row) for row in expected}) > 1
    with runner_of(guided.model).unguided():
        assert generate(guided, PROMPTS, CHAIN) != expected
    assert generate(guided, PROMPTS, CHAIN) == expected
    assert generate(guided, PROMPTS, CHAIN, draft) == expected
    assert generate(guided, PROMPTS, TREE, draft) == expected
    assert generate(guided, PROMPTS, CHAIN, head_proposer("eagle3", guided.model)) == expected


def test_samples_are_drawn_from_the_mixed_logits_and_matched_ones_are_the_same(guided, draft):
    sampled = CHAIN.model_copy(update={"temperature": 1.0, "verification": "match"})
    numbers = [Request(prompt_id=str(n), category="", tokens=tuple(prompt)).number for n, prompt in enumerate(PROMPTS)]
    expected = []
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        rng = CounterRNG(0, [number], torch.device("cpu"))

        def choose(logits, place, rng=rng):
            return draw(token_probabilities(logits, sampled), rng.uniform(Role.TARGET, torch.tensor([[place]]))[0, 0])

        expected.append(naively(guided.model, prompt, choose))
    assert generate(guided, PROMPTS, sampled) == expected
    assert generate(guided, PROMPTS, sampled, draft) == expected

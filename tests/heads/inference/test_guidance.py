"""Classifier-free guidance: plain and speculative decoding follow the mixed logits of two forwards, and nothing else does."""

import itertools

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import StaticTree
from configs.schema.target import GuidanceConfig
from eval.decoder.chain_rules import verify_block
from eval.decoder.decode import generate
from eval.decoder.request import Request
from eval.metrics.likelihood import answer_logits
from heads.frozen.hidden_states import read_states
from heads.inference.runner import Guidance, runner_of
from heads.proposers.draft_lm import DraftLM
from heads.sampling.counter_rng import CounterRNG, Role
from heads.sampling.probabilities import draw, token_probabilities
from tests.support.decoding import head_proposer
from tests.support.enumeration import Toy, enumerate_rule

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


@pytest.mark.parametrize("mistaken", [False, True])
def test_the_block_rule_gives_the_guided_distribution_exactly(guided, draft, mistaken):
    prompt, sizes = [9], range(3)
    prefixes = [prefix for size in sizes for prefix in itertools.product(range(12), repeat=size)]
    p, wrong, q = {}, {}, {}
    for size in sizes:
        same = [prefix for prefix in prefixes if len(prefix) == size]
        ids = [prompt + list(prefix) for prefix in same]
        p |= dict(zip(same, naive_logits(guided.model, ids)[:, -1].softmax(-1).tolist(), strict=True))
        with torch.no_grad():
            q |= dict(zip(same, draft.model(torch.tensor(ids)).logits[:, -1].softmax(-1).tolist(), strict=True))
        own = torch.stack([answer_logits(guided, prompt, [*prefix, 0])[-1] for prefix in same[:12]]).softmax(-1)
        wrong |= dict(zip(same[:12], own.tolist(), strict=True))
    for prefix, own in wrong.items():
        assert own == pytest.approx(p[prefix], abs=1e-9)

    def rule(p_BKV, *others):
        return verify_block(p_BKV.roll(1, 0) if mistaken else p_BKV, *others)

    distance = enumerate_rule(rule, Toy(12, 2, p, q)).total_variation
    assert distance > 1e-3 if mistaken else distance < 1e-9


def test_taps_are_those_of_the_text_with_its_condition_and_final_states_are_mixed(guided):
    ids = torch.tensor([[8, 1, 2], [10, 4, 9]])
    states = read_states(guided.model, ids, (1, 3))
    with runner_of(guided.model).unguided():
        plain = read_states(guided.model, ids, (1, 3))
    torch.testing.assert_close(states.taps_ABTE, plain.taps_ABTE, atol=1e-12, rtol=0)
    logits = guided.model.lm_head(states.final_BTE)
    torch.testing.assert_close(logits, naive_logits(guided.model, ids.tolist()), atol=1e-9, rtol=0)

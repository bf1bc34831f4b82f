"""On the real model, in float32, speculation changes no token."""

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from distill.student.kept_blocks import keep_layers
from eval.decoder.decode import generate
from heads.frozen.loading import load_target
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup

QUESTIONS = ["List three fruits and their colours.", "Repeat this twice: a rose is a rose is a rose."]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(dtype="float32"))


@pytest.fixture(scope="module")
def prompts(target):
    return [target.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def plain(target, prompts):
    return generate(target, prompts, DecodeConfig(num_speculative_tokens=0, max_new_tokens=NUM_TOKENS))


def test_plain_decoding_is_transformers_greedy_generation(target, prompts, plain):
    for prompt, answer in zip(prompts, plain, strict=True):
        ids = torch.tensor([prompt])
        expected = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)
        assert answer == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("name", "batch_size"), [("two_layers_of_it", 2), ("prompt_lookup", 1)])
def test_greedy_speculation_gives_the_plain_answers(target, prompts, plain, name, batch_size):
    two_layers = keep_layers(target.model, [0, 1]).eval()
    proposer = DraftLM(two_layers, target.vocab_size) if name == "two_layers_of_it" else PromptLookup(target.device)
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=NUM_TOKENS, batch_size=batch_size)
    assert generate(target, prompts, config, proposer) == plain

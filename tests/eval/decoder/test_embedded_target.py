"""On the real model, in float32, plain decoding is transformers' greedy generation, and speculation changes no token."""

import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import generate
from heads.frozen.loading import load_target
from heads.proposers.lookup import PromptLookup


def test_plain_decoding_is_transformers_greedy_generation_and_speculation_changes_nothing():
    target = load_target(TargetConfig(dtype="float32"))
    questions = ["List three fruits and their colours.", "Repeat this twice: a rose is a rose is a rose."]
    prompts = [target.encode_chat([{"role": "user", "content": question}]) for question in questions]
    plain = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        plain.append(text[0, len(prompt) :].tolist())
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=6, batch_size=2)
    for proposer in (None, PromptLookup(target.device)):
        assert generate(target, prompts, config, proposer) == plain

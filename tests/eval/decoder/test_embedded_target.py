"""On the real model, in float32, plain decoding is transformers' greedy generation, and speculation changes no token."""

import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from distill.student.kept_blocks import keep_layers
from eval.decoder.decode import generate
from heads.frozen.loading import load_target
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup

QUESTIONS = ["List three fruits and their colours.", "Repeat this twice: a rose is a rose is a rose."]


def test_plain_decoding_is_transformers_greedy_generation_and_speculation_changes_nothing():
    target = load_target(TargetConfig(dtype="float32"))
    prompts = [target.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    plain = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        plain.append(text[0, len(prompt) :].tolist())
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=8, batch_size=2)
    two_layers = DraftLM(keep_layers(target.model, [0, 1]).eval(), target.vocab_size)
    for proposer in (None, two_layers, PromptLookup(target.device)):
        assert generate(target, prompts, config, proposer) == plain

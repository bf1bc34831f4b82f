"""The decoder gives the tokens of the algorithm on one page, lossless by enumeration, and transformers' greedy ones."""

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from eval.decoder import plain
from eval.decoder.decode import generate
from eval.decoder.rules import ChainVerification
from heads.frozen.loading import load_target
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup
from heads.sampling.counter_rng import request_number
from tests.support.decoding import PROMPTS
from tests.support.enumeration import enumerate_rule, random_toy


def logits_of(model):
    return lambda tokens: model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}], ids=str)
@torch.no_grad()
def test_a_batch_gets_the_tokens_of_each_text_decoded_plainly(target, tiny_llama, as_target, sampling, num_drafts):
    other = tiny_llama(seed=1, spread=5.5)
    config = DecodeConfig(num_speculative_tokens=num_drafts, max_new_tokens=14, verification="token", batch_size=4, **sampling)
    alone = generate(target, PROMPTS, config.model_copy(update={"num_speculative_tokens": 0}))
    ends = (alone[0][5], alone[1][9])
    expected = [
        plain.decode(logits_of(target.model), logits_of(other), prompt, config, request=request_number(str(number)), eos=ends)
        for number, prompt in enumerate(PROMPTS)
    ]
    assert generate(as_target(target.model, eos=ends), PROMPTS, config, DraftLM(other, 64)) == expected
    assert {len(answer) for answer in expected} > {14}


def test_it_is_lossless_and_no_longer_where_too_many_drafts_stay():
    def rule(p_BKV, q_BGV, tokens_BG, num_drafted_B, accept_BG, residual_B, bonus_B):
        rows = zip(p_BKV, q_BGV, tokens_BG.tolist(), accept_BG, residual_B, bonus_B, strict=True)
        found = [plain.verify(*row, residual=residual, bonus=bonus) for *row, residual, bonus in rows]
        return ChainVerification(*torch.tensor(found).unbind(1))

    assert enumerate_rule(rule, random_toy(0, num_drafts=2)).total_variation < 1e-12

    def lenient(p, q, tokens, num_drafted, accept, *others):
        return rule(p, q, tokens, num_drafted, accept * 0.9, *others)

    assert enumerate_rule(lenient, random_toy(0, num_drafts=2)).total_variation > 1e-3


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

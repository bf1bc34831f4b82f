"""The decoder gives the tokens of the algorithm on one page, which is lossless by exact enumeration."""

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from eval.decoder import plain
from eval.decoder.decode import generate
from eval.decoder.rules import ChainVerification
from heads.proposers.draft_lm import DraftLM
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

"""Penalties are transformers' and vLLM's, for every token of a text and for every draft of a round."""

import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from configs.schema.decoding import DecodeConfig
from heads.sampling.draws import TextCounts, penalised, token_probabilities
from tests.support.distribution_checks import naive_penalised

VOCAB = 11
TEXTS, PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8], [10, VOCAB + 3]], [2, 4, 1]  # the last holds a mark of an image
DRAFTS = torch.tensor([[1, 1, 7], [5, 0, 5], [2, 2, 2]])


def logits_of(*shape):
    return 3 * torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.6},
        {"frequency_penalty": -0.4},
        {"repetition_penalty": 0.8, "presence_penalty": -1.1, "frequency_penalty": 0.9},
    ],
    ids=str,
)
def test_each_draft_is_penalised_for_the_text_and_for_the_drafts_before_it(settings):
    penalties, logits = DecodeConfig(**settings), logits_of(3, 4)
    counts = TextCounts.of(penalties, TEXTS, PROMPTS, VOCAB, torch.device("cpu"))
    found = penalised(logits, counts.along(DRAFTS))
    for row, (text, size, drafts) in enumerate(zip(TEXTS, PROMPTS, DRAFTS.tolist(), strict=True)):
        for place in range(4):
            known = [token for token in text if token < VOCAB]
            expected = naive_penalised(logits[row, place].tolist(), known[:size], [*known[size:], *drafts[:place]], penalties)
            assert found[row, place].tolist() == pytest.approx(expected, abs=1e-6)
    one_by_one = counts
    for draft_B in DRAFTS.unbind(1):
        one_by_one = one_by_one.then(draft_B)
    torch.testing.assert_close(penalised(logits[:, 3], one_by_one), found[:, 3])
    some = torch.tensor([1, 5, 9])
    torch.testing.assert_close(penalised(logits[..., some], counts.along(DRAFTS).among(some)), found[..., some])


def test_repetition_penalty_and_min_p_are_those_of_transformers():
    config, logits = DecodeConfig(temperature=0.7, min_p=0.02, repetition_penalty=1.4), logits_of(1)
    processors = [RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(0.7), MinPLogitsWarper(0.02)]
    expected = LogitsProcessorList(processors)(torch.tensor(TEXTS[:1]), logits).softmax(-1)
    counts = TextCounts.of(config, TEXTS[:1], PROMPTS[:1], VOCAB, logits.device)
    found = token_probabilities(penalised(logits, counts), config)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert 0 < int((found == 0).sum()) < VOCAB - 1

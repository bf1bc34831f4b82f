"""How alike two distributions are: both numbers against a naive float64 sum."""

import math

import pytest
import torch

from configs.schema.decoding import SamplingConfig
from eval.decoder.verifier import compare_distributions


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return 3 * torch.randn(2, 4, 12), 3 * torch.randn(2, 4, 12)


def naive_distribution(row, temperature, top_k=None, top_p=None):
    """Keep the likeliest tokens: so many, or until they have so much."""
    weights = [math.exp(value / temperature) for value in row.double().tolist()]
    probs, kept, mass = [weight / sum(weights) for weight in weights], [], 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if len(kept) == top_k or (top_p is not None and mass >= top_p):
            break
        kept.append(token)
        mass += probs[token]
    return [probs[token] / mass if token in kept else 0.0 for token in range(len(probs))]


@pytest.mark.parametrize("cut", [{}, {"top_k": 4}, {"top_p": 0.6}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_the_overlap_equals_a_naive_sum_after_the_cut(logits, temperature, cut):
    found_BGF = compare_distributions(*logits, SamplingConfig(temperature=temperature, **cut))
    for row in range(2):
        for place in range(4):
            p, q = (naive_distribution(each[row, place], temperature or 1.0, **cut) for each in logits)
            overlap = sum(map(min, p, q)) if temperature else float(p.index(max(p)) == q.index(max(q)))
            assert found_BGF[row, place].tolist() == pytest.approx([overlap, 0.0], rel=1e-5, abs=5e-6)


@pytest.mark.parametrize("narrow", [True, False])
def test_tokens_that_the_draft_cannot_say_are_set_apart(logits, narrow):
    p_logits, q_logits = logits
    unknown = torch.arange(12) >= 8
    said = q_logits[..., :8] if narrow else q_logits.masked_fill(unknown, float("-inf"))
    overlap_BG, uncovered_BG = compare_distributions(p_logits, said, SamplingConfig(temperature=1.0)).unbind(-1)
    p, q = p_logits.double().softmax(-1), torch.nn.functional.pad(q_logits[..., :8].double().softmax(-1), (0, 4))
    torch.testing.assert_close(uncovered_BG, (1 - p[..., :8].sum(-1)).float(), atol=1e-6, rtol=0)
    torch.testing.assert_close(overlap_BG, torch.minimum(p, q).sum(-1).float(), atol=1e-6, rtol=0)


def test_a_draft_whose_logits_are_no_numbers_overlaps_nowhere(logits):
    found_BGF = compare_distributions(logits[0], torch.full_like(logits[1], float("nan")), SamplingConfig(temperature=1.0))
    assert found_BGF.unique(dim=0).unique(dim=1).flatten().tolist() == [0.0, 1.0]

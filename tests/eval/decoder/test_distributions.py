"""How alike two distributions are: every number against a naive float64 sum, and its identities."""

import math

import pytest
import torch

from configs.schema.decoding import SamplingConfig
from eval.decoder.verifier import compare_distributions

NAMES = ("overlap", "kl", "uncovered", "agrees")
T1 = SamplingConfig(temperature=1.0)


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return 3 * torch.randn(2, 4, 12), 3 * torch.randn(2, 4, 12)


def compared(p_logits, q_logits, sampling=T1):
    return dict(zip(NAMES, compare_distributions(p_logits, q_logits, sampling).unbind(-1), strict=True))


def naive_distribution(row, temperature):
    weights = [math.exp(value / temperature) for value in row.double().tolist()]
    return [weight / sum(weights) for weight in weights]


def naive_cut(probs, top_k=None, top_p=None):
    """Keep the likeliest tokens: so many, or until they have so much."""
    kept, mass = [], 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if len(kept) == top_k or (top_p is not None and mass >= top_p):
            break
        kept.append(token)
        mass += probs[token]
    return [probs[token] / mass if token in kept else 0.0 for token in range(len(probs))]


@pytest.mark.parametrize("cut", [{}, {"top_k": 4}, {"top_p": 0.6}], ids=str)
@pytest.mark.parametrize(("temperature", "measured_at"), [(0.0, 1.0), (1.0, 1.0), (0.6, 0.6)])
def test_every_number_equals_a_naive_sum(logits, temperature, measured_at, cut):
    """The divergence is that before the cut, all else is after it."""
    p_logits, q_logits = logits
    found = compared(*logits, SamplingConfig(temperature=temperature, **cut))
    for row in range(2):
        for place in range(4):
            p = naive_distribution(p_logits[row, place], measured_at)
            q = naive_distribution(q_logits[row, place], measured_at)
            divergence = sum(one * math.log(one / other) for one, other in zip(p, q, strict=True))
            p, q = naive_cut(p, **cut), naive_cut(q, **cut)
            agrees = float(p.index(max(p)) == q.index(max(q)))
            overlap = sum(map(min, p, q)) if temperature else agrees
            expected = (overlap, divergence, 0.0, agrees)
            assert [float(found[name][row, place]) for name in NAMES] == pytest.approx(expected, rel=1e-5, abs=5e-6)


@pytest.mark.parametrize("narrow", [True, False])
def test_tokens_that_the_draft_cannot_say_are_set_apart(logits, narrow):
    p_logits, q_logits = logits
    unknown = torch.arange(12) >= 8
    said = q_logits[..., :8] if narrow else q_logits.masked_fill(unknown, float("-inf"))
    found = compared(p_logits, said)
    p = p_logits.double().softmax(-1)
    mass = p[..., :8].sum(-1)
    p_said, q_said = p[..., :8] / mass.unsqueeze(-1), q_logits[..., :8].double().softmax(-1)
    torch.testing.assert_close(found["uncovered"], (1 - mass).float(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found["kl"], (p_said * (p_said / q_said).log()).sum(-1).float(), atol=1e-5, rtol=1e-5)
    q = torch.nn.functional.pad(q_said, (0, 4))
    torch.testing.assert_close(found["overlap"], torch.minimum(p, q).sum(-1).float(), atol=1e-6, rtol=0)


def test_equal_distributions_diverge_not_at_all_and_underflow_and_no_numbers_give_finite_ones(logits):
    p_logits, q_logits = logits
    found = compared(p_logits, p_logits.clone())
    torch.testing.assert_close(found["overlap"], torch.ones(2, 4))
    assert float(found["kl"].max()) < 1e-6
    found = compared(torch.zeros(1, 1, 3), torch.tensor([[[0.0, 0.0, -400.0]]]))
    expected = math.log(1 / 3) - (2 / 3) * math.log(1 / 2) - (1 / 3) * (math.log(1 / 2) - 400)
    assert float(found["kl"]) == pytest.approx(expected, rel=1e-5)
    found = compared(p_logits, torch.full_like(q_logits, float("nan")))
    assert {float(found[name].max()) for name in ("overlap", "kl")} == {0.0}
    assert float(found["uncovered"].min()) == 1.0

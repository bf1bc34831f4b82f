"""How alike two distributions are: every number against a naive float64 sum, and its identities."""

import math

import pytest
import torch

from configs.schema.decoding import SamplingConfig
from eval.decoder.distribution_comparison import compare_distributions

T1 = SamplingConfig(temperature=1.0)


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return 3 * torch.randn(2, 4, 12), 3 * torch.randn(2, 4, 12), torch.randint(12, (2, 4))


def naive_distribution(row, temperature):
    weights = [math.exp(value / temperature) for value in row.double().tolist()]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(("temperature", "measured_at"), [(0.0, 1.0), (1.0, 1.0), (0.6, 0.6)])
def test_every_number_equals_a_naive_sum(logits, temperature, measured_at):
    p_logits, q_logits, tokens = logits
    found = compare_distributions(p_logits, q_logits, tokens, SamplingConfig(temperature=temperature))

    for row in range(2):
        for place in range(4):
            p = naive_distribution(p_logits[row, place], measured_at)
            q = naive_distribution(q_logits[row, place], measured_at)
            token = int(tokens[row, place])
            expected = {
                "overlap_BG": sum(map(min, p, q)) if temperature else float(p.index(max(p)) == q.index(max(q))),
                "kl_BG": sum(one * math.log(one / other) for one, other in zip(p, q, strict=True)),
                "uncovered_BG": 0.0,
                "agrees_BG": float(p.index(max(p)) == q.index(max(q))),
                "confidence_BG": q[token],
                "target_probability_BG": p[token],
            }
            for name, value in expected.items():
                assert float(getattr(found, name)[row, place]) == pytest.approx(value, rel=1e-5, abs=5e-6), name


def test_equal_distributions_overlap_wholly_and_diverge_not_at_all(logits):
    p_logits, _, tokens = logits
    found = compare_distributions(p_logits, p_logits.clone(), tokens, T1)

    torch.testing.assert_close(found.overlap_BG, torch.ones(2, 4))
    assert float(found.kl_BG.max()) < 1e-6
    assert found.agrees_BG.min() == 1
    assert torch.equal(found.confidence_BG, found.target_probability_BG)


@pytest.mark.parametrize("narrow", [True, False])
def test_tokens_that_the_draft_cannot_say_are_set_apart(logits, narrow):
    p_logits, q_logits, _ = logits
    unknown = torch.arange(12) >= 8
    said = q_logits[..., :8] if narrow else q_logits.masked_fill(unknown, float("-inf"))
    found = compare_distributions(p_logits, said, torch.zeros(2, 4, dtype=torch.int64), T1)

    p = p_logits.double().softmax(-1)
    mass = p[..., :8].sum(-1)
    p_said, q_said = p[..., :8] / mass.unsqueeze(-1), q_logits[..., :8].double().softmax(-1)
    torch.testing.assert_close(found.uncovered_BG, (1 - mass).float(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.kl_BG, (p_said * (p_said / q_said).log()).sum(-1).float(), atol=1e-5, rtol=1e-5)
    assert bool((found.overlap_BG <= mass + 1e-6).all())


def test_divergence_is_finite_where_probabilities_underflow():
    p_logits, q_logits = torch.zeros(1, 1, 3), torch.tensor([[[0.0, 0.0, -400.0]]])
    found = compare_distributions(p_logits, q_logits, torch.zeros(1, 1, dtype=torch.int64), T1)
    expected = math.log(1 / 3) - (2 / 3) * math.log(1 / 2) - (1 / 3) * (math.log(1 / 2) - 400)
    assert float(found.kl_BG) == pytest.approx(expected, rel=1e-5)


def test_a_draft_whose_logits_are_no_numbers_covers_nothing(logits):
    p_logits, q_logits, tokens = logits
    found = compare_distributions(p_logits, torch.full_like(q_logits, float("nan")), tokens, T1)
    assert {float(values.max()) for values in (found.overlap_BG, found.kl_BG, found.confidence_BG)} == {0.0}
    assert float(found.uncovered_BG.min()) == 1.0

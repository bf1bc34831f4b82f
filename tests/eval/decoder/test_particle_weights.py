"""The distribution of a particle run tends to the target's as particles grow in number, and resampling is unbiased."""

import itertools
import math
from collections import Counter

import pytest
import torch

from eval.decoder.particles import (
    choose,
    effective_sample_size,
    resample,
    systematic_ancestors,
    weigh,
    weight_shares,
)


def random_distributions(seed, *shape):
    return (1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).softmax(-1)


def distribution_after_one_cycle(p_V, q_V, bonus_VV, num_particles):
    """Give the exact distribution `[V, V]` of the chosen particle's draft and bonus, over every number of particles at every
    draft."""
    vocab_size = len(p_V)
    chosen_VV = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    for drafts in itertools.combinations_with_replacement(range(vocab_size), num_particles):
        counts = Counter(drafts)
        ways = math.factorial(num_particles) / math.prod(map(math.factorial, counts.values()))
        probability = ways * math.prod(q_V[token].item() for token in drafts)
        tokens_BN = torch.tensor([drafts])
        distributions = [probs_V.expand(1, num_particles, 1, vocab_size) for probs_V in (p_V, q_V)]
        start = torch.zeros(1, num_particles)
        weights = weigh(start, *distributions, tokens_BN.unsqueeze(-1), torch.ones_like(tokens_BN))
        for token, share in zip(drafts, weight_shares(weights)[0].tolist(), strict=True):
            chosen_VV[token] += probability * share * bonus_VV[token]
    return chosen_VV


def test_the_exact_distribution_of_one_cycle_approaches_the_targets():
    p_V, q_V = random_distributions(0, 2, 3)
    bonus_VV = random_distributions(1, 3, 3)
    aim_VV = p_V.unsqueeze(1) * bonus_VV
    distances = [
        (distribution_after_one_cycle(p_V, q_V, bonus_VV, count) - aim_VV).abs().sum().item() / 2 for count in (1, 2, 4, 8, 16)
    ]
    assert distances == sorted(distances, reverse=True)
    # The bias of a self-normalised estimate falls with 1/N.
    assert distances[-1] < distances[1] / 5
    assert distances[0] == pytest.approx(float((q_V - p_V).abs().sum() / 2))


def test_a_draft_that_is_the_target_keeps_all_weights_equal_and_never_resamples():
    p = random_distributions(3, 5, 8, 4, 6)
    tokens = torch.randint(6, (5, 8, 4), generator=torch.Generator().manual_seed(0))
    weights = weigh(torch.zeros(5, 8), p, p, tokens, torch.full((5, 8), 4))
    assert torch.equal(weights, torch.zeros(5, 8, dtype=torch.float64))
    assert effective_sample_size(weights).tolist() == pytest.approx([8.0] * 5)
    assert resample(weights, torch.rand(5), below=0.999)[0].tolist() == [list(range(8))] * 5


def test_a_weight_is_the_ratio_of_the_two_joint_probabilities_of_what_was_drafted():
    p, q = random_distributions(4, 2, 3, 4, 3, 5)
    tokens = torch.randint(5, (3, 4, 3), generator=torch.Generator().manual_seed(0))
    counts = torch.arange(12).reshape(3, 4) % 4
    weights = weigh(torch.full((3, 4), 0.7), p, q, tokens, counts)
    for row, particle in itertools.product(range(3), range(4)):
        ratio = math.exp(0.7)
        for i in range(counts[row, particle]):
            token = tokens[row, particle, i]
            ratio *= (p[row, particle, i, token] / q[row, particle, i, token]).item()
        assert math.exp(weights[row, particle]) == pytest.approx(ratio, rel=1e-6)


def test_systematic_resampling_gives_each_particle_its_share_to_within_one_place():
    weights = torch.tensor([[0.0, -1.0, -0.3, -math.inf, 0.6]])
    wanted = 5 * weight_shares(weights)[0]
    offsets = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    ancestors = systematic_ancestors(weights.expand(2000, -1), offsets)
    places = torch.stack([(ancestors == particle).sum(1) for particle in range(5)], 1)
    assert (places.double().mean(0) - wanted).abs().max() < 1e-3
    assert bool(((places >= wanted.floor()) & (places <= wanted.ceil())).all())


def test_only_worn_out_requests_resample_and_they_start_again_from_equal_weights():
    weights = torch.tensor([[0.0, 0.1, 0.0, 0.1], [0.0, -9.0, -9.0, -9.0]])
    ancestors, after = resample(weights, torch.tensor([0.3, 0.3]), below=0.5)
    assert ancestors.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    assert torch.equal(after, torch.stack([weights[0], torch.zeros(4)]))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_no_offset_leads_to_a_particle_without_weight(uniform):
    weights = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    assert set(systematic_ancestors(weights, torch.tensor([uniform], dtype=torch.float64))[0].tolist()) <= {1, 2}
    assert choose(weights, torch.tensor([uniform], dtype=torch.float64)).item() in (1, 2)


def test_where_the_target_rules_out_every_text_all_go_on_and_are_weighed_again():
    weights_BN = torch.tensor([[-torch.inf] * 3, [0.0, -torch.inf, 0.0]])
    assert weight_shares(weights_BN)[0].tolist() == [1 / 3] * 3
    ancestors_BN, after_BN = resample(weights_BN, torch.full((2,), 0.4), below=0.5)
    assert ancestors_BN[0].tolist() == [0, 1, 2]
    assert after_BN[0].tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(after_BN[1], weights_BN[1])

"""Particles: their distribution tends to the target's as they grow in number, resampling is unbiased, caches follow texts."""

import itertools
import math

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, ParticleSampling
from eval.decoder.decode import decode
from eval.decoder.particles import ParticleRun, choose, resample, systematic_ancestors, weigh, weight_shares
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup
from heads.sampling.draws import token_probabilities
from tests.support import distribution_checks as checks
from tests.support.decoding import requests_for

PROMPTS = [(7, 12, 3), (20, 9, 9, 31, 5, 6), (40,)]


# --- weights ------------------------------------------------------------------------------------------------------


def random_distributions(seed, *shape):
    return (1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).softmax(-1)


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
    weights = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    for uniform_R in (torch.zeros(1).double(), torch.full((1,), 1 - 2**-53).double()):  # no offset leads to one without weight
        assert set(systematic_ancestors(weights, uniform_R)[0].tolist()) <= {1, 2}
        assert choose(weights, uniform_R).item() in (1, 2)


def test_only_worn_out_requests_resample_and_they_start_again_from_equal_weights():
    weights = torch.tensor([[0.0, 0.1, 0.0, 0.1], [0.0, -9.0, -9.0, -9.0], [-math.inf] * 4])
    ancestors, after = resample(weights, torch.full((3,), 0.3), below=0.5)
    assert ancestors.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 2, 3]]  # where every text is ruled out, all go on
    assert torch.equal(after, torch.stack([weights[0], torch.zeros(4), torch.zeros(4)]))


# --- in the decoder -----------------------------------------------------------------------------------------------


def sampled(num_particles, resample_below=0.5, **others):
    lossy = ParticleSampling(kind="smc", num_particles=num_particles, resample_below=resample_below)
    return DecodeConfig(**{"num_speculative_tokens": 3, "max_new_tokens": 14, "temperature": 0.7, "lossy": lossy} | others)


@pytest.fixture(scope="module")
def pair(tiny_llama, as_target):
    target, draft = checks.models(tiny_llama)
    return as_target(target), draft


def test_the_distribution_approaches_the_targets_as_particles_grow(pair, exact_distribution):
    """By the total variation of the second and third token's shares, both drafted."""
    number = 1_000
    aim_VV = exact_distribution(pair[0].model, checks.PROMPT, 3, checks.SAMPLED).double().sum(0)
    distances = []
    for num_particles in (1, 4, 12):
        config = sampled(num_particles, 0.9, num_speculative_tokens=2, max_new_tokens=4, temperature=1.2)
        counts, _ = checks.sample(*pair, config, number)
        shares_VV = torch.zeros_like(aim_VV)
        for text, count in counts.items():
            shares_VV[text[1:]] += count / number
        distances.append(float((shares_VV - aim_VV).abs().sum() / 2))
    noise = math.sqrt(checks.VOCAB**2 / number) / 2  # what so many draws from the distribution itself are off by, about
    assert distances[0] > 3 * noise
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < 1.5 * noise


@torch.no_grad()
def test_resampled_places_go_on_with_their_ancestors_cache(target, tiny_llama, monkeypatch):
    """The target's distribution that a place is weighed by is that of an independent forward over its text."""
    seen = []

    def noting(log_weights_RN, p_RNGV, q_RNGV, tokens_RNG, read_RN):
        seen.append((p_RNGV, q_RNGV, tokens_RNG))
        return weigh(log_weights_RN, p_RNGV, q_RNGV, tokens_RNG, read_RN)

    monkeypatch.setattr("eval.decoder.particles.weigh", noting)
    model = tiny_llama(seed=3)
    config = sampled(4, 1.0, max_new_tokens=13)  # full cycles to the end
    run = ParticleRun(target, requests_for(PROMPTS[:2]), config, DraftLM(model, 64))
    run.prefill()
    moved = 0
    while run.active:
        before = [list(particle.tokens) for particle in run.active]
        run.round()
        p_BGV, q_BGV, tokens_BG = (value.flatten(0, 1) for value in seen[-1])
        for row, text in enumerate(before):
            drafts = tokens_BG[row].tolist()
            for who, probs_GV in ((target.model, p_BGV[row]), (model, q_BGV[row])):
                logits_TV = who(torch.tensor([[*text, *drafts]])).logits[0, len(text) - 1 : -1]
                torch.testing.assert_close(probs_GV, token_probabilities(logits_TV, config), atol=1e-5, rtol=1e-4)
        after = [particle.tokens[: len(text)] for particle, text in zip(run.active, before, strict=False)]
        moved += sum(one != other for one, other in zip(before, after, strict=False))
    assert moved > 0


@pytest.mark.parametrize(("ends", "num_particles"), [(tuple(range(0, 64, 7)), 3), ((3, 11, 25, 40), 8)])
def test_texts_may_end_at_any_place_and_the_answer_stops_there(target, as_target, tiny_llama, ends, num_particles):
    """Of a few ends and many particles, some requests are left with copies of ended texts only."""
    target, draft = as_target(target.model, eos=ends), DraftLM(tiny_llama(seed=2), 64)
    requests = requests_for([(7, n, 12) for n in range(40)])
    generations, _ = decode(target, requests, sampled(num_particles, temperature=1.0), draft)
    assert {generation.stop_reason for generation in generations} == {"eos", "length"}
    for generation in generations:
        places = [place for place, token in enumerate(generation.tokens) if token in target.eos_token_ids]
        assert (places == [len(generation.tokens) - 1]) == (generation.stop_reason == "eos")
        assert generation.rounds == ()


def test_drafts_are_weighed_up_to_and_with_the_first_end_of_text(target, as_target, draft):
    run = ParticleRun(as_target(target.model, eos=(3,)), requests_for(PROMPTS[:1]), sampled(3), draft)
    tokens = torch.tensor([[5, 3, 3], [5, 6, 3], [5, 3, 6]])
    assert run._up_to_the_end(tokens, torch.tensor([3, 2, 1])).tolist() == [2, 2, 1]


def test_a_request_whose_logits_are_not_finite_fails_alone(tiny_llama, as_target, draft):
    model = tiny_llama(seed=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[40] = float("nan")
    mixed, _ = decode(as_target(model), requests_for(PROMPTS), sampled(3), draft)
    alone, _ = decode(as_target(model), requests_for(PROMPTS[:1]), sampled(3), draft)
    assert mixed[2].stop_reason == "non_finite"
    assert mixed[0].tokens == alone[0].tokens


def test_what_particles_cannot_weigh_is_refused(target):
    requests = requests_for([(5, 6, 5, 6, 5)])
    with pytest.raises(InputError, match="PromptLookup draws none"):
        decode(target, requests, sampled(2), PromptLookup(target.device))

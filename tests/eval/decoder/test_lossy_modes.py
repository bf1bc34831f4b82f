"""Lossy decoding does what its papers say, is flagged wherever it is reported, and leaves plain decoding alone."""

import math

import pytest
import torch
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, ParticleSampling, TypicalAcceptance
from configs.schema.drafting import DynamicTree, StaticTree
from configs.schema.evaluation import EvalConfig, GateConfig, LosslessConfig, QualityConfig
from eval.decoder.decode import decode
from eval.decoder.particles import ParticleRun, weigh
from eval.decoder.request import BatchRow
from eval.decoder.typical import typical_threshold
from eval.lossless.verdict import judge_lossless
from eval.measure.interleaved import measure
from eval.release.checks import judge
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup
from heads.sampling.probabilities import token_probabilities
from tests.support import distribution_checks as checks
from tests.support.decoding import held_against, requests_for
from tests.support.reports import changed

PROMPTS = [(7, 12, 3), (20, 9, 9, 31, 5, 6), (40,)]
TREES = {
    "chain": None,
    "static": StaticTree(kind="static", branching=[3, 2, 1]),
    "dynamic": DynamicTree(kind="dynamic", num_nodes=9, width=3),
}


def sampled(lossy, **others):
    return DecodeConfig(**{"num_speculative_tokens": 3, "max_new_tokens": 14, "temperature": 0.7, "lossy": lossy} | others)


def typical(**settings):
    return TypicalAcceptance(kind="typical", **settings)


def smc(num_particles, **settings):
    return ParticleSampling(kind="smc", num_particles=num_particles, **settings)


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


@pytest.fixture
def draft(tiny_llama):
    return DraftLM(tiny_llama(seed=1, spread=5.5), 64)


# --- typical acceptance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("drafts", ["likeliest", "drawn"])
@torch.no_grad()
def test_every_kept_draft_is_plausible_and_the_target_adds_its_likeliest(target, draft, tree, drafts):
    if (tree, drafts) == ("dynamic", "drawn"):
        pytest.skip("refused")
    config = sampled(typical(drafts=drafts), tree=TREES[tree])
    generations, _ = decode(target, requests_for(PROMPTS), config, draft)
    kept = 0
    for generation in generations:
        text = [*generation.prompt_tokens, generation.tokens[0]]
        for round_ in generation.rounds:
            for place, token in enumerate(round_.committed):
                probs_V = token_probabilities(target.model(torch.tensor([text])).logits[0, -1], config)
                if place < round_.num_accepted:
                    assert probs_V[token] > typical_threshold(probs_V, config.lossy.epsilon, config.lossy.delta)
                else:
                    assert token == probs_V.argmax()
                text.append(token)
            kept += round_.num_accepted
    assert kept > 0


@pytest.mark.parametrize("lossy", [typical(), typical(drafts="drawn"), smc(3)])
def test_a_request_gets_the_same_tokens_in_any_batch(target, draft, lossy):
    together, _ = decode(target, requests_for(PROMPTS), sampled(lossy), draft)
    alone = [decode(target, [request], sampled(lossy), draft)[0][0] for request in requests_for(PROMPTS)]
    assert [(each.tokens, each.rounds) for each in together] == [(each.tokens, each.rounds) for each in alone]


# --- particles ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tiny_llama, as_target):
    target, draft = checks.models(tiny_llama)
    return as_target(target), draft


def distance_from_the_target(pair, exact_distribution, num_particles, number):
    """Give the total variation of the second and third token's shares, both drafted, from the target's distribution."""
    config = checks.SAMPLED.model_copy(
        update={"num_speculative_tokens": 2, "max_new_tokens": 4, "lossy": smc(num_particles, resample_below=0.9)}
    )
    counts, _ = checks.sample(*pair, config, number)
    shares_VV = torch.zeros(checks.VOCAB, checks.VOCAB, dtype=torch.float64)
    for text, count in counts.items():
        shares_VV[text[1:]] += count / number
    return float((shares_VV - exact_distribution(pair[0].model, checks.PROMPT, 3, config).double().sum(0)).abs().sum() / 2)


def test_the_distribution_approaches_the_targets_as_particles_grow(pair, exact_distribution):
    number = 1_000
    distances = [distance_from_the_target(pair, exact_distribution, count, number) for count in (1, 4, 12)]
    noise = math.sqrt(checks.VOCAB**2 / number) / 2  # what so many draws from the distribution itself are off by, about
    assert distances[0] > 3 * noise
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < 1.5 * noise


def test_a_draft_that_is_the_target_is_lossless_with_any_number_of_particles(pair, exact_distribution):
    target, _ = pair
    distribution = exact_distribution(target.model, checks.PROMPT, 3, checks.SAMPLED)
    config = checks.SAMPLED.model_copy(update={"lossy": smc(3, resample_below=1.0)})
    counts, _ = checks.sample(target, target.model, config, 2_000)
    assert held_against(distribution, counts).p_value > 1e-3


@torch.no_grad()
def test_resampled_places_go_on_with_their_ancestors_cache(target, tiny_llama, monkeypatch):
    """The target's distribution that a place is weighed by is that of an independent forward over its text."""
    seen = []

    def noting(log_weights_RN, p_RNGV, q_RNGV, tokens_RNG, read_RN):
        seen.append((p_RNGV, q_RNGV, tokens_RNG))
        return weigh(log_weights_RN, p_RNGV, q_RNGV, tokens_RNG, read_RN)

    monkeypatch.setattr("eval.decoder.particles.weigh", noting)
    model = tiny_llama(seed=3)
    config = sampled(smc(4, resample_below=1.0), max_new_tokens=13)  # full cycles to the end
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
    generations, _ = decode(target, requests, sampled(smc(num_particles), temperature=1.0), draft)
    assert {generation.stop_reason for generation in generations} == {"eos", "length"}
    for generation in generations:
        places = [place for place, token in enumerate(generation.tokens) if token in target.eos_token_ids]
        assert (places == [len(generation.tokens) - 1]) == (generation.stop_reason == "eos")
        assert generation.rounds == ()


def test_a_copied_text_ends_at_a_stop_string_that_was_begun_before_it_was_copied(target):
    row = BatchRow(requests_for([(7,)])[0], target, DecodeConfig(stop=["w1 w2"]))
    one, two = target.tokenizer.convert_tokens_to_ids(["w1", "w2"])
    row.commit([one], finite=True)
    other = row.copied()
    other.commit([two], finite=True)
    assert (other.stop_reason, row.stop_reason) == ("stop", None)
    row.commit([one], finite=True)
    assert (len(other.tokens), len(row.tokens)) == (3, 3)


def test_a_request_whose_logits_are_not_finite_fails_alone(tiny_llama, as_target, draft):
    model = tiny_llama(seed=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[40] = float("nan")
    mixed, _ = decode(as_target(model), requests_for(PROMPTS), sampled(smc(3)), draft)
    alone, _ = decode(as_target(model), requests_for(PROMPTS[:1]), sampled(smc(3)), draft)
    assert mixed[2].stop_reason == "non_finite"
    assert mixed[0].tokens == alone[0].tokens


def test_particles_need_a_draft_with_a_distribution(target):
    with pytest.raises(InputError, match="PromptLookup draws none"):
        decode(target, requests_for([(5, 6, 5, 6, 5)]), sampled(smc(2)), PromptLookup(target.device))


# --- the flag -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lossy", [typical(), smc(2)])
def test_plain_decoding_and_the_baselines_stay_lossless(target, draft, lossy):
    config = EvalConfig.model_construct(decode=sampled(lossy), repeats=1, warmup_prompts=0)
    proposers = {"speculative": draft, "prompt_lookup": PromptLookup(target.device)}
    records = measure(target, requests_for(PROMPTS), config, proposers)
    plain, _ = decode(target, requests_for(PROMPTS), sampled(None))
    assert [each.tokens for each in records.of("autoregressive")] == [each.tokens for each in plain]
    assert [each.tokens for each in records.of("prompt_lookup")] == [each.tokens for each in plain]
    assert [each.tokens for each in records.of("speculative")] != [each.tokens for each in plain]


@pytest.mark.parametrize("lossy", [typical(), smc(2)])
def test_the_verdict_names_a_lossy_mode_and_tests_no_samples(target, draft, lossy):
    plain, _ = decode(target, requests_for(PROMPTS), sampled(lossy))
    other, _ = decode(target, requests_for(PROMPTS), sampled(lossy), draft)
    section = judge_lossless(target, plain, other, sampled(lossy), LosslessConfig(), None)
    assert (section["verdict"], section["checks"]) == ("lossy_by_design", {})


def test_the_gate_refuses_a_lossy_report_unless_it_lists_the_verdict(report):
    lossy = {"kind": "typical", "epsilon": 0.09, "delta": 0.3, "drafts": "likeliest"}
    report = changed(report, {"lossless": {"verdict": "lossy_by_design", "divergences": []}, "decode.lossy": lossy})
    assert judge(report, GateConfig()).outcome == "fail"
    quality = {"num_answers": 2, "num_identical": 1, "num_failed": 0, "num_cut": 0, "perplexity": None, "scores": {}}
    report = changed(report, {"quality": quality})
    assert judge(report, GateConfig()).outcome == "fail"
    assert judge(report, GateConfig(lossless=["lossy_by_design"])).outcome == "pass"


def test_an_evaluation_refuses_a_lossy_mode_without_the_quality_beside_it():
    with pytest.raises(ValidationError, match="changes answers, and nothing judges them: set quality"):
        EvalConfig(decode=sampled(typical()))
    assert EvalConfig(decode=sampled(typical()), quality=QualityConfig()).decode.rule == "typical"


def test_particles_take_no_logits_processor(target, draft):
    with pytest.raises(InputError, match="particles weigh drafts by raw logits"):
        decode(target, requests_for(PROMPTS), sampled(smc(2)), draft, logits_processor=lambda _, scores: scores)

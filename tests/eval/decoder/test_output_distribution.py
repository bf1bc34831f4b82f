"""What the whole decoder samples follows the target's distribution, for every shape and rule.

The quick tests run 2,000 samples a case, the slow ones 100,000, at which a bias of one in a
hundred shows.
"""

import numpy as np
import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.heads import DSparkSettings, EarlyExitSettings
from eval.decoder.decode import Request, decode
from eval.decoder.verifier import compare_distributions
from heads.families.registry import FAMILIES, serve
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import LookupFirst
from tests.support import distribution_checks as checks
from tests.support.decoding import held_against
from tests.support.family_checks import build

QUICK, SLOW = 2_000, 100_000
LEVEL = 1e-3


@pytest.fixture(scope="module")
def pair(tiny_llama, as_target):
    target, draft = checks.models(tiny_llama)
    return as_target(target), draft


@pytest.fixture(scope="module")
def distribution_of(pair, exact_distribution):
    """A function from a way of decoding to the exact distribution of the first tokens."""
    return lambda config: exact_distribution(pair[0].model, checks.PROMPT, checks.DEPTH, config)


@pytest.mark.parametrize("number", [QUICK, pytest.param(SLOW, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("name", checks.CASES)
def test_samples_follow_the_targets_distribution(pair, distribution_of, name, number):
    config = checks.CASES[name]
    counts, rounds = checks.sample(*pair, config, number, lookup=checks.lookup_of(name))
    assert number < rounds < 3.5 * number  # drafts are accepted and rejected
    assert held_against(distribution_of(config), counts).p_value > LEVEL


def test_samples_follow_it_where_the_targets_first_block_drafts(pair, distribution_of):
    target, config = pair[0], checks.CASES["lookup or chain, block"]
    head = serve(build(EarlyExitSettings(kind="early_exit", taps=[1]), target.model, stir=0.5), target.model)
    proposer = FAMILIES["early_exit"].propose(head, target.device)
    counts, rounds = checks.sample(target, proposer, config, QUICK, lookup=checks.lookup_of("lookup"))
    assert QUICK < rounds < 3.5 * QUICK
    assert held_against(distribution_of(config), counts).p_value > LEVEL


def test_samples_follow_it_where_a_head_stops_by_its_own_estimate(pair, distribution_of):
    target = pair[0]
    settings = DSparkSettings(kind="dspark", block_size=4, taps=[0, 1], mask_token_id=0, markov_rank=4)
    dspark = FAMILIES["dspark"].propose(serve(build(settings, target.model, stir=0.5), target.model), target.device)
    counts, rounds = checks.sample(pair[0], dspark, checks.BY_ESTIMATE, QUICK)
    whole = checks.sample(pair[0], dspark, checks.SAMPLED, QUICK)[1]
    assert whole < rounds < 3.5 * QUICK  # some rounds are ended early
    assert held_against(distribution_of(checks.BY_ESTIMATE), counts).p_value > LEVEL


def test_it_is_found_that_looked_up_drafts_are_judged_as_if_the_draft_had_drawn_them(pair, distribution_of, monkeypatch):
    monkeypatch.setattr(LookupFirst, "_points", lambda self, tokens_BG: torch.full((*tokens_BG.shape, checks.VOCAB), 0.25))
    counts, _ = checks.sample(*pair, checks.SAMPLED, QUICK, lookup=checks.lookup_of("lookup"))
    assert held_against(distribution_of(checks.SAMPLED), counts).p_value < LEVEL


# --- how alike two distributions are -------------------------------------------------------------------------------------


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return 3 * torch.randn(2, 4, 12), 3 * torch.randn(2, 4, 12)


@pytest.mark.parametrize("cut", [{}, {"top_k": 4}, {"top_p": 0.6}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_the_overlap_equals_a_naive_sum_after_the_cut(logits, temperature, cut):
    tokens = logits[1].argmax(-1)
    drawn = DecodeConfig(temperature=temperature, verification="token", **cut)
    found_BGF = compare_distributions(*logits, tokens, drawn)
    likeliest_BG = compare_distributions(*logits, tokens, drawn.model_copy(update={"verification": "one_hot"}))[..., 0]
    for row in range(2):
        for place in range(4):
            p, q = (checks.naive_distribution(each[row, place].tolist(), temperature or 1.0, **cut) for each in logits)
            overlap = sum(map(min, p, q)) if temperature else float(p.index(max(p)) == q.index(max(q)))
            assert found_BGF[row, place].tolist() == pytest.approx([overlap, 0.0], rel=1e-5, abs=5e-6)
            of_draft = p[int(tokens[row, place])] if temperature else overlap
            assert float(likeliest_BG[row, place]) == pytest.approx(of_draft, rel=1e-5, abs=5e-6)


@pytest.mark.parametrize("way", ["one_hot", "token", "typical", "neighbourhood"])
def test_as_many_drafts_are_accepted_as_the_overlap_says(pair, way, tmp_path):
    np.save(tmp_path / "codes.npy", np.random.default_rng(0).normal(size=(checks.VOCAB, 2)))
    near = {"kind": "neighbourhood", "k": 2, "delta": 0.1, "codebook": str(tmp_path / "codes.npy")}
    lossy = {"typical": {"kind": "typical", "epsilon": 0.4, "delta": 1.5}, "neighbourhood": near}.get(way)
    settings = {"num_speculative_tokens": 1, "max_new_tokens": 12, "temperature": 1.2, "lossy": lossy}
    config = DecodeConfig.model_validate(settings | {"verification": None if lossy else way})
    requests = [Request(prompt_id=str(each), category="", tokens=(each % 4, each // 4 % 4)) for each in range(400)]
    generations, _ = decode(pair[0], requests, config, DraftLM(pair[1], checks.VOCAB), measure_overlap=True)
    rounds = [each for generation in generations for each in generation.rounds if each.overlap]
    overlap, kept = np.array([(each.overlap[0], each.num_accepted) for each in rounds]).T
    assert abs((kept - overlap).sum()) <= 3.5 * np.sqrt((overlap * (1 - overlap)).sum())
    assert 0 < kept.mean() < 1


@pytest.mark.parametrize("narrow", [True, False])
def test_tokens_that_the_draft_cannot_say_are_set_apart(logits, narrow):
    p_logits, q_logits = logits
    unknown = torch.arange(12) >= 8
    said = q_logits[..., :8] if narrow else q_logits.masked_fill(unknown, float("-inf"))
    drawn = DecodeConfig(temperature=1.0, verification="token")
    overlap_BG, uncovered_BG = compare_distributions(p_logits, said, said.argmax(-1), drawn).unbind(-1)
    p, q = p_logits.double().softmax(-1), torch.nn.functional.pad(q_logits[..., :8].double().softmax(-1), (0, 4))
    torch.testing.assert_close(uncovered_BG, (1 - p[..., :8].sum(-1)).float(), atol=1e-6, rtol=0)
    torch.testing.assert_close(overlap_BG, torch.minimum(p, q).sum(-1).float(), atol=1e-6, rtol=0)


def test_a_draft_whose_logits_are_no_numbers_overlaps_nowhere(logits):
    for verification in ("token", "one_hot"):
        config, broken = DecodeConfig(temperature=1.0, verification=verification), torch.full_like(logits[1], float("nan"))
        found_BGF = compare_distributions(logits[0], broken, broken.argmax(-1), config)
        assert found_BGF.unique(dim=0).unique(dim=1).flatten().tolist() == [0.0, 1.0]

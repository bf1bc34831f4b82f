"""Counts in a draft's chain: the mixture that the docstring says, at every temperature, along the tokens that were drafted."""

import pytest
import torch

from configs.schema.decoding import DecodeConfig, SamplingConfig
from configs.schema.drafting import DynamicTree, StaticTree
from eval.decoder.decode import decode, generate
from heads.proposers.chain_builder import ChainBuilder
from heads.proposers.counted import SHARE, CountedTexts, beside, mixed
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import SuffixLookup
from heads.proposers.merged import LookupFirstTrees
from heads.proposers.suffixes import SuffixText, automaton_of
from heads.sampling.counter_rng import CounterRNG
from heads.vocabulary import DraftVocabulary
from tests.support import family_checks as checks
from tests.support.decoding import PROMPTS, head_proposer, requests_for

CPU = torch.device("cpu")
ANSWERS = [[1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 6]] * 4
TEXTS = [[7, 1, 2], [0, 0]]  # the second ends with nothing that was counted but its own
VOCABULARY = DraftVocabulary(token_ids_W=torch.tensor([1, 4, 6]), target_vocab_size=8)


def texts():
    memory = automaton_of(ANSWERS)
    found = [SuffixText(memory) for _ in TEXTS]
    for text, tokens in zip(found, TEXTS, strict=True):
        text.read(tokens)
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_what_is_mixed_is_what_the_formula_says(temperature):
    logits_BV = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    logits_BV[:, 3] = -torch.inf
    T = temperature or 1.0
    expected_BV = (logits_BV.double() / T).softmax(-1)
    for row, text in enumerate(texts()):
        counted = text.probabilities(text.end())
        expected_BV[row] *= 1 - SHARE * sum(counted.values())
        for token, probability in counted.items():
            expected_BV[row, token] += SHARE * probability
    mixture = mixed(logits_BV, None, CountedTexts(texts()), temperature)
    torch.testing.assert_close((mixture.logits.double() / T).softmax(-1), expected_BV, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_of_fewer_tokens_mixes_as_one_of_all_that_never_drafts_the_others(temperature):
    generator = torch.Generator().manual_seed(1)
    logits_BMW = torch.randn(2, 1, 3, generator=generator)
    logits_BMV = torch.full((2, 1, 8), -torch.inf).index_copy(-1, VOCABULARY.token_ids_W, logits_BMW)
    few, all_of_them = CountedTexts(texts()), CountedTexts(texts())
    origins_BM = torch.zeros(2, 2, dtype=torch.int64)
    for tokens_BM in (torch.tensor([[3, 4], [0, 1]]), None):
        mixture = mixed(logits_BMW, VOCABULARY, few, temperature, 1 if tokens_BM is not None else 2)
        whole = mixed(logits_BMV, None, all_of_them, temperature, 1 if tokens_BM is not None else 2)
        torch.testing.assert_close(mixture.over_target(mixture.logits, -torch.inf), whole.logits)
        ranked = mixture.target_ids(mixture.logits.topk(2, dim=-1).indices)
        assert torch.equal(ranked, whole.logits.topk(2, dim=-1).indices)
        if tokens_BM is not None:
            few.follow(tokens_BM, origins_BM)
            all_of_them.follow(tokens_BM, origins_BM)


def test_a_chain_goes_on_from_the_tokens_that_were_drafted_and_keeps_the_logits_that_it_chose_by():
    flat_BW = torch.zeros(2, 3)
    with beside(CountedTexts(texts())):
        chain = ChainBuilder([3, 2], SamplingConfig(), CounterRNG(0, [0, 1], CPU), VOCABULARY, keep_logits=True)
    for _ in range(2):
        chain.add(flat_BW)
    proposal = chain.proposal()
    assert proposal.tokens_BG[0].tolist() == [3, 4]  # after 1, 2 comes 3, which the vocabulary lacks
    assert torch.equal(proposal.logits_BGV.argmax(-1), proposal.tokens_BG)
    alone = ChainBuilder([3, 2], SamplingConfig(), CounterRNG(0, [0, 1], CPU), VOCABULARY, keep_logits=False)
    assert alone.add(flat_BW).tolist() == [1, 1]


def test_a_distribution_of_nan_stays_one():
    assert mixed(torch.full((2, 8), torch.nan), None, CountedTexts(texts()), 1.0).logits.isnan().all()


TREES = {
    "chain": None,
    "static": StaticTree(kind="static", branching=[2, 2, 1]),
    "dynamic": DynamicTree(kind="dynamic", width=2, num_nodes=6),
}


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name", ["eagle3", "medusa", "draft_lm"])
def test_counts_of_the_answers_help_a_draft_that_knows_nothing_and_change_no_answer(tiny_llama, as_target, name, shape):
    target = as_target(checks.tiny_target("llama"))
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, batch_size=3, tree=TREES[shape])
    answers = generate(target, PROMPTS, config.model_copy(update={"num_speculative_tokens": 0, "tree": None}))
    draft = DraftLM(tiny_llama(seed=2), 64) if name == "draft_lm" else head_proposer(name, target.model)
    num_rounds = []
    for expects in (99.0, 1.5, None):
        both = draft if expects is None else LookupFirstTrees(SuffixLookup(target.device, answers, min_expected=expects), draft)
        generations, _ = decode(target, requests_for(PROMPTS), config, both, measure_overlap=shape == "chain")
        assert [list(each.tokens) for each in generations] == answers
        num_rounds.append(sum(len(each.rounds) for each in generations))
        assert any(round_.by_lookup for each in generations for round_ in each.rounds) == (expects == 1.5)
    assert num_rounds[0] < num_rounds[2]

"""Drafts come from the distribution that is handed to verification; the stopping rule decides by that alone."""

import math

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, SamplingConfig
from configs.schema.drafting import ConfidenceStopping
from heads.proposers.chain_builder import ChainBuilder
from heads.proposers.protocol import RoundInputs
from heads.sampling.counter_rng import CounterRNG, Role
from heads.sampling.probabilities import draw, token_probabilities
from heads.vocabulary import DraftVocabulary

VOCABULARY = DraftVocabulary(token_ids_W=torch.tensor([1, 4, 6]), target_vocab_size=8)
STEPS = [torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 0.5]]), torch.tensor([[1.0, 0.0, 0.2], [0.0, 0.1, 0.3]])]
SAMPLED = SamplingConfig(temperature=0.8, top_p=0.9)
SURE, UNSURE, BROKEN = [0.0, 5.0, 0.0], [0.0, 0.1, 0.2], [0.0, math.nan, 0.0]
CONFIDENCE = ConfidenceStopping(rule="confidence", threshold=0.5)


def drafting(sampling, vocabulary=VOCABULARY, *, keep_logits=False, lengths=(5, 9)):
    rng = CounterRNG(3, range(11, 11 + len(lengths)), torch.device("cpu"))
    inputs = RoundInputs.of([[0] * length for length in lengths], rng, num_drafts=4)
    return ChainBuilder(inputs, sampling, vocabulary, keep_logits=keep_logits)


def stopped(stopping, temperature=0.0, **others):
    sampling = DecodeConfig(num_speculative_tokens=4, stopping=stopping, temperature=temperature)
    return drafting(sampling, None, **others)


def test_greedy_drafts_are_the_likeliest_tokens_and_have_no_distribution():
    greedy = drafting(SamplingConfig())
    assert [greedy.add(logits_BW).tolist() for logits_BW in STEPS] == [[4, 1], [1, 6]]
    proposal = greedy.proposal()
    assert proposal.tokens_BG.tolist() == [[4, 1], [1, 6]]
    assert (proposal.num_drafted.host, proposal.probs_BGV, proposal.logits_BGV) == ([2, 2], None, None)


def test_sampled_drafts_follow_the_distribution_that_is_handed_over_with_the_raw_logits():
    sampled = drafting(SAMPLED, keep_logits=True)
    drafted = torch.stack([sampled.add(logits_BW) for logits_BW in STEPS], 1)
    proposal = sampled.proposal()
    assert torch.equal(proposal.tokens_BG, drafted)
    rng = CounterRNG(3, [11, 12], torch.device("cpu"))
    for step, logits_BW in enumerate(STEPS):
        probs_BW = token_probabilities(logits_BW, SAMPLED)
        torch.testing.assert_close(proposal.probs_BGV[:, step, VOCABULARY.token_ids_W], probs_BW)
        torch.testing.assert_close(proposal.probs_BGV[:, step].sum(-1), torch.ones(2))
        # The draft that is step places ahead of a row of length n stands at position n + step, in the round named n.
        uniform_B1 = rng.uniform(Role.DRAFT, torch.tensor([[5 + step], [9 + step]]), torch.tensor([[5], [9]]))
        assert drafted[:, step].tolist() == VOCABULARY.token_ids_W[draw(probs_BW, uniform_B1.squeeze(1))].tolist()
    torch.testing.assert_close(proposal.logits_BGV[..., VOCABULARY.token_ids_W], torch.stack(STEPS, 1))
    assert torch.isneginf(proposal.logits_BGV).sum() == 2 * 2 * 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_token_of_the_first_unsure_distribution_is_the_last_of_its_row(temperature):
    drafts, free = (stopped(each, temperature, keep_logits=True) for each in (CONFIDENCE, None))
    tokens, finished = [], []
    for logits in ([SURE, SURE], [UNSURE, SURE], [SURE, UNSURE], [SURE, SURE]):
        tokens.append(drafts.add(torch.tensor(logits)))
        assert torch.equal(tokens[-1], free.add(torch.tensor(logits)))  # a rule changes no draw
        finished.append(drafts.finished)
    assert finished == [False, False, True, True]
    proposal = drafts.proposal()
    assert (proposal.num_drafted.host, free.proposal().num_drafted.host) == ([2, 3], [4, 4])
    assert torch.equal(proposal.tokens_BG, torch.stack(tokens[:3], 1))
    assert proposal.logits_BGV.shape == (2, 3, 3)
    assert (proposal.probs_BGV is None) == (temperature == 0)


def test_a_distribution_that_is_no_distribution_goes_on_to_the_decoder():
    drafts = stopped(CONFIDENCE, 1.0, lengths=[5])
    for _ in range(3):
        drafts.add(torch.tensor([BROKEN]))
    assert not drafts.finished
    assert drafts.proposal().num_drafted.host == [3]


def test_a_rule_by_estimates_is_refused_where_the_draft_makes_none():
    with pytest.raises(InputError, match="stopping"):
        stopped(ConfidenceStopping(rule="confidence", threshold=0.4, by="estimate")).add(torch.tensor([SURE, SURE]))

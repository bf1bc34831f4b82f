"""Drafted tokens come from the distribution that is handed to verification, by the draft's own numbers, in the target's ids."""

import pytest
import torch

from configs.schema.decoding import SamplingConfig
from heads.proposers.chain_builder import ChainBuilder
from heads.sampling.counter_rng import CounterRNG, Role
from heads.sampling.probabilities import draw, token_probabilities
from heads.vocabulary import DraftVocabulary

VOCABULARY = DraftVocabulary(token_ids_W=torch.tensor([1, 4, 6]), target_vocab_size=8)
STEPS = [torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 0.5]]), torch.tensor([[1.0, 0.0, 0.2], [0.0, 0.1, 0.3]])]
SAMPLED = SamplingConfig(temperature=0.8, top_p=0.9)


def drafting(sampling, *, keep_logits=False, rows=(5, 9)):
    return ChainBuilder(
        rows,
        sampling,
        CounterRNG(3, range(11, 11 + len(rows)), torch.device("cpu")),
        VOCABULARY,
        keep_logits=keep_logits,
    )


def test_greedy_drafts_are_the_likeliest_tokens_and_have_no_distribution():
    greedy = drafting(SamplingConfig())
    assert [greedy.add(logits_BW).tolist() for logits_BW in STEPS] == [[4, 1], [1, 6]]
    proposal = greedy.proposal()
    assert proposal.tokens_BG.tolist() == [[4, 1], [1, 6]]
    assert (proposal.num_drafted, proposal.probs_BGV, proposal.logits_BGV) == ([2, 2], None, None)


def test_sampled_drafts_follow_the_distribution_that_is_handed_over():
    sampled = drafting(SAMPLED)
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


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
def test_kept_logits_are_the_raw_ones_and_what_cannot_be_said_has_none(sampling):
    kept = drafting(sampling, keep_logits=True)
    for logits_BW in STEPS:
        kept.add(logits_BW)
    logits_BGV = kept.proposal().logits_BGV
    torch.testing.assert_close(logits_BGV[..., VOCABULARY.token_ids_W], torch.stack(STEPS, 1))
    assert torch.isneginf(logits_BGV).sum() == 2 * 2 * 5

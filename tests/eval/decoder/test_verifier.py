"""Rows of a batch are judged each by the distribution that its drafts came from."""

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from eval.decoder.verifier import Verifier
from heads.proposers.protocol import Proposal
from heads.sampling.counter_rng import CounterRNG


@pytest.mark.parametrize("verification", ["token", "block"])
def test_rows_of_a_batch_are_judged_by_the_distribution_of_whoever_drafted_them(verification):
    """Row by row the same as alone: a looked-up row by a point mass, whatever stands in its place of the draft's own."""
    config = DecodeConfig(temperature=1.0, verification=verification)
    B, G, V = 200, 2, 5
    generator = torch.Generator().manual_seed(3)
    logits_BKV = torch.randn(B, G + 1, V, generator=generator)
    tokens_BG = torch.randint(V, (B, G), generator=generator)
    q_BGV = torch.rand(B, G, V, generator=generator).softmax(-1)
    by_lookup = [number % 2 == 0 for number in range(B)]

    def chain(rows, **drawn):
        verifier = Verifier(config, CounterRNG(0, rows, torch.device("cpu")))
        proposal = Proposal(tokens_BG=tokens_BG[rows], num_drafted=[G] * len(rows), **drawn)
        return torch.stack(verifier.chain(logits_BKV[rows], proposal, [G] * len(rows), [7] * len(rows)), 1)

    together = chain(list(range(B)), probs_BGV=q_BGV, by_lookup=by_lookup)
    points_BGV = torch.nn.functional.one_hot(tokens_BG, V).float()
    for row in range(B):
        own_BGV = (points_BGV if by_lookup[row] else q_BGV)[row : row + 1]
        assert torch.equal(together[row : row + 1], chain([row], probs_BGV=own_BGV))
        if by_lookup[row]:  # and where the whole batch was looked up, so that the draft was not asked
            assert torch.equal(together[row : row + 1], chain([row], by_lookup=[True]))

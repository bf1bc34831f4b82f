"""Requests for the decoder, and checks of its output, shared by the tests of the decoder and of proposers."""

from collections import Counter

import torch

from eval.decoder.decode import Request
from eval.lossy.decode import decode
from eval.stats.significance import GTest, g_test
from heads.artifact import Draft, Metadata
from heads.proposers.draft_lm import DraftLM

PROMPTS = [[7, 12, 3], [20, 9, 9, 31, 5, 6], [40], [11, 12, 13, 11, 12, 13, 11, 12]]


def requests_for(prompts, category="c"):
    return [Request(prompt_id=f"p{n}", category=category, tokens=tuple(prompt)) for n, prompt in enumerate(prompts)]


def assert_same_alone(target, config, proposer, prompts=PROMPTS):
    """A request gets the same tokens and rounds beside others as by itself. Return the generations."""
    together, _ = decode(target, requests_for(prompts), config, proposer)
    for request, generation in zip(requests_for(prompts), together, strict=True):
        (alone,), _ = decode(target, [request], config, proposer)
        assert (alone.tokens, alone.stop_reason) == (generation.tokens, generation.stop_reason)
        assert alone.rounds == generation.rounds
    return together


def loaded_draft(model, vocab_size):
    """A draft model as `heads.artifact.load_draft` returns it."""
    metadata = Metadata(
        kind="draft_lm", target={}, draft_vocab_size=vocab_size, num_speculative_tokens=3, training={}, provenance={}
    )
    return Draft(metadata=metadata, proposer=DraftLM(model, vocab_size), num_parameters=1, sha256="0" * 64, warnings=[])


def samples_against(distribution, generations) -> GTest:
    """Test the first tokens of answers against their exact probabilities, a dimension a token."""
    return held_against(distribution, Counter(each.tokens[: distribution.dim()] for each in generations))


def held_against(distribution, counts) -> GTest:
    """Test counts by text against its exact probabilities, a dimension a token; rare texts share a cell."""
    number = sum(counts.values())
    expected = distribution.double().flatten() / distribution.double().sum()
    seen = torch.zeros_like(expected)
    for text, count in counts.items():
        index = 0
        for token in text:
            index = index * distribution.shape[0] + token
        seen[index] += count
    assert (seen[expected == 0] == 0).all()
    rare = expected * number < 5
    cells = [*zip(seen[~rare].int().tolist(), expected[~rare].tolist(), strict=True)]
    cells.append((int(seen[rare].sum()), float(expected[rare].sum())))
    counts_C, shares_C = zip(*(cell for cell in cells if cell[1] > 0), strict=True)
    return g_test(counts_C, shares_C)

"""Requests for the decoder, drafts of every kind, and checks of its output."""

import torch

from eval.decoder.decode import Request, decode
from eval.stats import GTest, g_test
from heads.artifact import Draft
from heads.families.registry import FAMILIES
from heads.metadata import Metadata
from heads.proposers.draft_lm import DraftLM
from tests.support.family_checks import SETTINGS, build

PROMPTS = [[7, 12, 3], [20, 9, 9, 31, 5, 6], [40], [11, 12, 13, 11, 12, 13, 11, 12]]
# For targets of four blocks; every way in which a family drafts. With fewer passes than drafts, XPress' last drafts rest on
# tokens of an earlier pass.
HEADS = {
    **{kind: SETTINGS[kind] for kind in ("medusa", "eagle3", "mtp", "peagle", "dflash", "dspark", "dflash2", "domino")},
    "hydra": SETTINGS["hydra, prefix"],
    "xpress": SETTINGS["xpress"].model_copy(update={"num_jacobi_passes": 1}),
    "early_exit": SETTINGS["early_exit"],
}


def head_proposer(name, model):
    """Return a proposer with an untrained head from `HEADS`."""
    return FAMILIES[HEADS[name].kind].propose(build(HEADS[name], model), model.device)


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


def metadata_of_draft_lm(target, vocab_size=64):
    """Return an artifact's metadata, with the identity of a target as a dict."""
    settings = {"kind": "draft_lm", "num_speculative_tokens": 3, "training": {}, "provenance": {}}
    return Metadata(target=target, draft_vocab_size=vocab_size, **settings)


def loaded_draft(model, vocab_size):
    """A draft model as `heads.artifact.load_draft` returns it."""
    return Draft(
        metadata=metadata_of_draft_lm({}, vocab_size),
        proposer=DraftLM(model, vocab_size),
        num_parameters=1,
        sha256="0" * 64,
        warnings=[],
    )


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

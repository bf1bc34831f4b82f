"""Decoding on a device that is not the CPU: the CPU's tokens to the bit, and one transfer to the host a round."""

import copy

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import DynamicTree, StaticTree
from eval.decoder.batch import BatchRun
from eval.decoder.decode import Request
from heads.families.registry import FAMILIES
from heads.proposers.draft_lm import DraftLM
from heads.proposers.prompt_lookup import PromptLookup
from heads.proposers.suffix_lookup import SuffixLookup
from tests.device.mock_device import counted
from tests.support import family_checks as checks
from tests.support.decoding import HEADS

pytestmark = pytest.mark.device

PROMPTS = [[7, 12, 3, 44, 9], [20, 9, 9, 31, 5, 6, 2, 50, 17], [40]]
SHAPES = {
    "chain": None,
    "static": StaticTree(kind="static", paths=[[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]]),
    "dynamic": DynamicTree(kind="dynamic", num_nodes=7, width=3),
}
SAMPLING = {"greedy": {}, "drawn": {"temperature": 1.0, "top_p": 0.9}}
NO_TREES = {"prompt_lookup", "suffix_lookup", "mtp_by_depth", "peagle", "dflash", "dspark"}
OTHERS = {
    "draft_lm": lambda model: DraftLM(model, 64),
    "prompt_lookup": lambda model: PromptLookup(model.device),
    "suffix_lookup": lambda model: SuffixLookup(model.device),
}


def decode(target, proposer, config):
    """Decode a ragged batch; return the rows' tokens, and what each round made the host wait for."""
    requests = [Request(prompt_id=str(n), category="", tokens=tuple(prompt)) for n, prompt in enumerate(PROMPTS)]
    rounds = []
    with torch.inference_mode():
        run = BatchRun(target, requests, config, proposer)
        run.prefill()
        with run.clock.phase("decode"):
            while run.active:
                with counted() as counts:
                    run.round()
                rounds.append({place: times for place, times in counts.items() if place[0] in ("out", "wait")})
    return [row.tokens for row in run.rows], rounds


def proposer_of(name, model):
    if name in OTHERS:
        return OTHERS[name](model)
    head = checks.build(HEADS[name], model).to(model.device)
    return FAMILIES[HEADS[name].kind].propose(head, model.device)


CASES = [
    (name, shape, sampling)
    for name in (*HEADS, *OTHERS)
    for shape in SHAPES
    for sampling in SAMPLING
    if shape == "chain" or (name not in NO_TREES and (shape, sampling) != ("dynamic", "drawn"))
]


@pytest.mark.parametrize(("name", "shape", "sampling"), CASES)
def test_the_tokens_are_the_cpus_and_a_round_waits_once(mock, as_target, name, shape, sampling):
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=10, tree=SHAPES[shape], **SAMPLING[sampling])
    model = checks.tiny_target("llama")
    moved = copy.deepcopy(model).to(mock)
    expected, _ = decode(as_target(model), proposer_of(name, model), config)
    tokens, rounds = decode(as_target(moved), proposer_of(name, moved), config)
    assert tokens == expected
    most = 2 if shape != "chain" and sampling == "drawn" else 1
    assert all(sum(waits.values()) <= most for waits in rounds), rounds

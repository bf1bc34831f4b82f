"""Decoding on a device that is not the CPU: the CPU's tokens to the bit, and one transfer each way a round."""

import copy
from functools import partial

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import Request, start_run
from heads.families.registry import FAMILIES
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import LookupFirst, MergedDrafts, PromptLookup, SuffixLookup
from tests.device.mock_device import counted
from tests.support import family_checks as checks
from tests.support.decoding import HEADS

pytestmark = pytest.mark.device

PROMPTS = [[7, 12, 3, 44, 9], [20, 9, 9, 31, 5, 6, 2, 50, 17], [40]]
DRAFTS = 3
STATIC = {"kind": "static", "paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]]}
DYNAMIC = {"kind": "dynamic", "num_nodes": 7, "width": 3}
DRAWN = {"temperature": 1.0, "top_p": 0.9}
TYPICAL = {"lossy": {"kind": "typical"}}
# Every way of decoding, by the shape of a round's drafts and the rule that judges them.
WAYS = {
    "chain greedy": {},
    "chain block": DRAWN | {"verification": "block"},
    "chain token": DRAWN | {"verification": "token", "top_k": 20},
    "chain one_hot": DRAWN,
    "chain penalties": DRAWN | {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    "chain typical": DRAWN | TYPICAL,
    "chain int8": {"kv_cache": "int8"},
    "chain stopped by confidence": {"stopping": {"rule": "confidence", "threshold": 0.3}},
    "static greedy": {"tree": STATIC},
    "static without_replacement": DRAWN | {"tree": STATIC},
    "static with_replacement": DRAWN | {"tree": STATIC | {"candidates": "with_replacement"}},
    "static k_seq": DRAWN | {"tree": STATIC | {"candidates": "k_seq"}},
    "static one_hot": DRAWN | {"tree": STATIC, "verification": "one_hot"},
    "static typical": DRAWN | TYPICAL | {"tree": STATIC},
    "dynamic greedy": {"tree": DYNAMIC},
    "particles": DRAWN | {"lossy": {"kind": "smc", "num_particles": 3}},
}


def head(name, model, vocabulary=None):
    module = checks.build(HEADS[name], model, vocabulary).to(model.device)
    return FAMILIES[HEADS[name].kind].propose(module, model.device)


def noisy(model):
    """A draft that is often right: the target with some noise."""
    draft = copy.deepcopy(model).cpu()
    torch.manual_seed(7)
    for parameter in draft.parameters():
        parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    return draft.to(model.device)


PROPOSERS = {name: partial(head, name) for name in HEADS} | {
    "plain": lambda model: None,
    "draft_lm": lambda model: DraftLM(noisy(model), 64),
    "prompt_lookup": lambda model: PromptLookup(model.device),
    "suffix_lookup": lambda model: SuffixLookup(model.device),
    "draft_lm first lookup": lambda model: LookupFirst(PromptLookup(model.device), DraftLM(noisy(model), 64), 64),
    "eagle3 first lookup": lambda model: LookupFirst(SuffixLookup(model.device), head("eagle3", model), 64),
    "eagle3 some tokens": lambda model: head("eagle3", model, checks.SOME_TOKENS),
    "medusa some tokens": lambda model: head("medusa", model, checks.SOME_TOKENS),
    "merged": lambda model: MergedDrafts([DraftLM(noisy(model), 64), head("medusa", model)], model.device),
}
TREES = {"draft_lm", "medusa", "hydra", "eagle3", "mtp", "eagle3 some tokens", "medusa some tokens"}
FEW = ["chain greedy", "chain block", "static greedy", "static without_replacement", "dynamic greedy"]


def ways_of(name):
    """Every way for a draft LM and one head; two of chains and three of trees for the others."""
    if name == "merged":
        return ["static greedy", "static match", "dynamic greedy"]
    ways = WAYS if name in ("draft_lm", "eagle3 some tokens") else FEW
    chains_only = [way for way in ways if WAYS[way].get("tree") is None]
    return ways if name in TREES else chains_only


def decode(target, proposer, config):
    """Decode a ragged batch; return the rows' tokens, and by round what was copied and waited for, and whether rows ended."""
    requests = [Request(prompt_id=str(n), category="", tokens=tuple(prompt)) for n, prompt in enumerate(PROMPTS)]
    rounds = []
    with torch.inference_mode():
        run = start_run(target, requests, config, proposer)
        run.prefill()
        with run.clock.phase("decode"):
            while run.active:
                size = len(run.active)
                with counted() as counts:
                    run.round()
                rounds.append((dict(counts), len(run.active) < size))
    return [row.tokens for row in run.rows], rounds


def most_transfers(name, way, has_ended):
    """The most copies of a round to the host and from it.

    What a round begins with goes there in one copy, and what its draft reads in one or two. A rule that may stop a draft asks
    after each step. Drafts that are merged read what they lack and come to the host one by
    one, and their tree goes back. Particles choose texts that have ended, and resample. Rows that stay where others end are
    named to the device.
    """
    out, into = 1, 3 + has_ended
    if "stopped" in way:
        out += DRAFTS + 1
    if way == "particles":
        out, into = out + 2, into + 4
    if name == "merged":
        out, into = out + 2, into + 3
    return out, into


def assert_few_transfers(name, way, rounds):
    for counts, has_ended in rounds:
        out = {place: times for place, times in counts.items() if place[0] in ("out", "wait")}
        into = {place: times for place, times in counts.items() if place[0].startswith("in")}
        most_out, most_into = most_transfers(name, way, has_ended)
        assert sum(out.values()) <= most_out, out
        assert sum(into.values()) <= most_into, into
        assert {place[0] for place in into} <= {"in, not waited for"}, into


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in PROPOSERS for way in ways_of(name)])
def test_the_tokens_are_the_cpus_and_a_round_waits_once(mock, as_target, name, way):
    config = DecodeConfig.model_validate({"num_speculative_tokens": DRAFTS, "max_new_tokens": 10} | WAYS[way])
    model = checks.tiny_target("llama")
    moved = copy.deepcopy(model).to(mock)
    expected, _ = decode(as_target(model), PROPOSERS[name](model), config)
    target, proposer = as_target(moved), PROPOSERS[name](moved)
    first, _ = decode(target, proposer, config)  # which puts there what stays: trees, rotary embeddings
    tokens, rounds = decode(target, proposer, config)
    assert tokens == first == expected
    assert_few_transfers(name, way, rounds)


@pytest.mark.parametrize("way", ["chain block", "chain stopped by confidence", "static greedy", "static without_replacement"])
def test_a_draft_on_another_device_than_the_target_drafts_what_it_drafts_at_home(mock, as_target, way):
    config = DecodeConfig.model_validate({"num_speculative_tokens": DRAFTS, "max_new_tokens": 10} | WAYS[way])
    model = checks.tiny_target("llama")
    draft = DraftLM(noisy(model), 64)
    expected, _ = decode(as_target(model), draft, config)
    away = DraftLM(draft.model, 64, home=mock)
    tokens, rounds = decode(as_target(copy.deepcopy(model).to(mock)), away, config)
    assert tokens == expected
    # The numbers of the requests go to the draft, its proposal comes back, a tensor a copy.
    out = [sum(times for (kind, _), times in counts.items() if kind in ("out", "wait")) for counts, _ in rounds]
    assert max(out) <= 2, rounds

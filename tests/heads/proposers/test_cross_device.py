"""A draft on a device of its own proposes what it proposes at home, and everything that crosses goes through one place.

One device is all there is here, so what crosses is counted; that two work together is not shown.
"""

from dataclasses import fields

import pytest
import torch

import heads.proposers.cross_device
from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import StaticTree
from configs.schema.target import TargetConfig
from eval.decoder.decode import decode
from heads.artifact import load_draft
from heads.frozen.loading import load_target
from heads.proposers.cross_device import CrossDeviceProposer
from heads.proposers.draft_lm import DraftLM
from heads.proposers.protocol import TreeProposer
from tests.support.decoding import PROMPTS, requests_for

CPU = torch.device("cpu")
GREEDY = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12)
SETTINGS = {
    "greedy": GREEDY,
    "sampled": GREEDY.model_copy(update={"temperature": 1.0}),
    "tree": GREEDY.model_copy(update={"tree": StaticTree(kind="static", branching=[2, 1, 1])}),
    "drawn_tree": GREEDY.model_copy(
        update={"temperature": 1.0, "tree": StaticTree(kind="static", branching=[2, 1, 1])},
    ),
}


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


@pytest.fixture(scope="module")
def draft(tiny_llama):
    return DraftLM(tiny_llama(seed=2), 64)


def answers(target, proposer, config):
    return decode(target, requests_for(PROMPTS), config, proposer, measure_overlap=True)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_of_the_draft_at_home_and_all_that_crosses_does_so_in_one_place(target, draft, name, monkeypatch):
    crossed = []

    def noting(values, device):
        copied = values.clone()  # so that a tensor that did not come by here is known by its identity
        crossed.append(copied)
        return copied

    monkeypatch.setattr(heads.proposers.cross_device, "transfer", noting)
    seen = []

    class Watched(CrossDeviceProposer):
        def _home(self, proposal):
            seen.append(super()._home(proposal))
            return seen[-1]

        def _there(self, rng):
            there = super()._there(rng)
            assert any(there.requests_B is each for each in crossed)
            return there

    away = Watched(draft, CPU, CPU)
    assert isinstance(away, TreeProposer)
    assert answers(target, away, SETTINGS[name]) == answers(target, draft, SETTINGS[name])
    held = [getattr(proposal, field.name) for proposal in seen for field in fields(proposal)]
    tensors = [value for value in held if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 2 * len(seen) > 0
    assert all(any(value is each for each in crossed) for value in tensors)


def test_an_artifact_is_loaded_where_it_is_asked_for(tiny_run):
    target = load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))
    away = load_draft(tiny_run / "artifact", target.identity, target.model, device="cpu")
    at_home = load_draft(tiny_run / "artifact", target.identity, target.model)
    assert isinstance(away.proposer, CrossDeviceProposer)
    assert isinstance(at_home.proposer, DraftLM)
    assert away.sha256 == at_home.sha256
    assert answers(target, away.proposer, GREEDY) == answers(target, at_home.proposer, GREEDY)


@pytest.mark.parametrize("device", ["cuda:7", "gpu", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(tiny_run, device):
    target = load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))
    with pytest.raises(InputError, match=f"draft_device: '{device}' cannot be used"):
        load_draft(tiny_run / "artifact", target.identity, target.model, device=device)

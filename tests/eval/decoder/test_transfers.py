"""A round waits for the device once: what was decided comes over in one copy, and nothing before or after it asks.

Counted on a CPU, where waiting costs nothing and shows nowhere: each call that would have to see a tensor's values on a GPU.
Where the decoder looks at values on a CPU only (`eval.decoder.rules.may_hold`), it is made to do what it does elsewhere.
"""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from configs.schema.decoding import ConfidenceStopping, DecodeConfig, DynamicTree, StaticTree
from eval.decoder.batch import BatchRun
from eval.decoder.decode import Request
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import LookupFirst, MergedDrafts, PromptLookup
from tests.support import family_checks as checks
from tests.support.decoding import HEADS, head_proposer

PROMPTS = [[7, 12, 3, 44, 9], [20, 9, 9, 31, 5, 6, 2, 50, 17], [40]]
WAITS = {
    *("tolist", "item", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal"),
    *("allclose", "is_nonzero", "bincount", "__bool__", "__int__", "__float__", "__index__", "__contains__"),
}
TREES = {
    "static": StaticTree(kind="static", paths=[[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]]),
    "dynamic": DynamicTree(kind="dynamic", num_nodes=7, width=3),
}
DRAFTS_TREES = ["draft_lm", "medusa", "hydra", "eagle3", "mtp"]


class Waits(TorchFunctionMode):
    """Notes each call that has to see the values of a tensor."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name in WAITS or _looks_up_a_mask(name, args) or _repeats_by_a_tensor(name, args, kwargs or {}):
            self.seen.append(name)
        elif name == "to" and "cpu" in [each for each in args[1:] if isinstance(each, str)]:  # a device may be any, also here
            self.seen.append("to cpu")
        elif name == "where" and len(args) == 1:
            self.seen.append("where")
        return func(*args, **(kwargs or {}))


def _looks_up_a_mask(name, args):
    """Whether a tensor is indexed by a mask, whose True values have to be counted first."""
    if name not in ("__getitem__", "__setitem__"):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in index)


def _repeats_by_a_tensor(name, args, kwargs):
    return name == "repeat_interleave" and any(isinstance(each, torch.Tensor) for each in (*args[1:], *kwargs.values()))


def waits_by_round(target, config, proposer, monkeypatch):
    """Decode a ragged batch; return what each round waited for."""
    monkeypatch.setattr("eval.decoder.rules.may_hold", lambda flags_B: True)
    requests = [Request(prompt_id=str(n), category="", tokens=tuple(prompt)) for n, prompt in enumerate(PROMPTS)]
    rounds = []
    with torch.inference_mode():
        run = BatchRun(target, requests, config, proposer)
        run.prefill()
        while run.active:
            with Waits() as waits:
                run.round()
            rounds.append(waits.seen)
    return rounds


def test_the_count_sees_a_look_at_values():
    looks = [lambda x: x.tolist(), lambda x: x[x > 0], lambda x: x.to("cpu"), lambda x: [1, 2, 3][x[0]]]
    looks += [lambda x: bool(x.any()), lambda x: x.repeat_interleave(x)]
    for look in looks:
        with Waits() as waits:
            look(torch.tensor([1, 0, 2]))
        assert len(waits.seen) == 1


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(checks.tiny_target("llama"))


def proposer_of(name, model):
    if name == "draft_lm":
        return DraftLM(model, 64)
    if name == "lookup_first":
        return LookupFirst(PromptLookup(model.device), DraftLM(model, 64), 64)
    return PromptLookup(model.device) if name == "prompt_lookup" else head_proposer(name, model)


SAMPLED = {"temperature": 1.0, "top_p": 0.9}
CHAINS = [(name, way) for name in ("draft_lm", "prompt_lookup", "lookup_first", *HEADS) for way in ({}, SAMPLED)]
GROWN = [{"tree": TREES["static"]}, {"tree": TREES["static"]} | SAMPLED, {"tree": TREES["dynamic"]}]


@pytest.mark.parametrize(("name", "way"), [*CHAINS, *((name, way) for name in DRAFTS_TREES for way in GROWN)])
def test_a_round_waits_once(target, name, way, monkeypatch):
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=10, **way)
    rounds = waits_by_round(target, config, proposer_of(name, target.model), monkeypatch)
    assert rounds == [["tolist"]] * len(rounds)


def test_plain_decoding_waits_once_a_token_and_several_drafts_at_once_cost_a_transfer_each(target, monkeypatch):
    config = DecodeConfig(num_speculative_tokens=0, max_new_tokens=8)
    assert waits_by_round(target, config, None, monkeypatch) == [["tolist"]] * 7
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=9, tree=TREES["static"])
    drafts = [proposer_of(name, target.model) for name in ("medusa", "draft_lm")]
    rounds = waits_by_round(target, config, MergedDrafts(drafts, target.device), monkeypatch)
    assert rounds == [["tolist"] * 3] * len(rounds)


def test_a_rule_for_stopping_waits_once_a_draft_step(target, monkeypatch):
    stopping = ConfidenceStopping(rule="confidence", threshold=0.0)
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=9, stopping=stopping)
    rounds = waits_by_round(target, config, proposer_of("draft_lm", target.model), monkeypatch)
    assert all(1 < len(waited) <= 1 + 3 + 1 for waited in rounds)

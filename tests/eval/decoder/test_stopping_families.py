"""Every family that drafts chains stops where a rule says, and what comes out is the target's, greedy and sampled."""

import itertools
from collections import defaultdict

import pytest
import torch

import heads.proposers.chain_builder
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import CalibrationPoint, ConfidenceStopping, CostStopping, EntropyStopping
from eval.decoder.decode import decode
from heads.modules.autoregressive import FeatureChain
from heads.proposers.draft_length import StopDecision
from heads.proposers.draft_lm import DraftLM
from heads.proposers.self_speculation import early_exit
from tests.support.decoding import HEADS, assert_same_alone, head_proposer, requests_for, samples_against
from tests.support.family_checks import tiny_target

NAMES = [*HEADS, "self_speculation"]
PROMPTS = [(1, 2, 0), (2, 0, 1, 1, 2), (0, 0)]
# Every family with one of the rules, which all of them ask in the same place (`heads.proposers.chain_builder`).
families = pytest.mark.parametrize(("name", "kind"), list(zip(NAMES, itertools.cycle(["confidence", "entropy", "cost"]))))


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    """A target of three tokens, so that the joint distribution of several can be counted."""
    model = tiny_llama(seed=4, vocab_size=3, layers=4, dtype=torch.float32, spread=3.0).requires_grad_(False)
    model.lm_head.weight.mul_(3.0)  # heads share it: distributions sure and unsure
    return as_target(model)


@pytest.fixture(scope="module")
def wide_target(as_target):
    """A target of more tokens, whose greedy answers do not soon go in circles, in float64."""
    return as_target(tiny_target("llama"))


@pytest.fixture(scope="module")
def distribution(target, exact_distribution):
    """The joint probabilities of the four tokens after (1, 2), at temperature 1.2."""
    return exact_distribution(target.model, (1, 2), 4, DecodeConfig(temperature=1.2))


def proposer_of(name, target):
    if name == "self_speculation":
        return DraftLM(early_exit(target.model, 2), target.vocab_size)
    return head_proposer(name, target.model)


class NotingRule:
    """Stops nothing and notes the distributions it sees."""

    def __init__(self, distributions):
        self.distributions = distributions

    def decide(self, probs_BV):
        self.distributions.append(probs_BV)
        everywhere_B = torch.ones(len(probs_BV), dtype=torch.bool)
        return StopDecision(everywhere_B, everywhere_B)


def distributions_of(proposer, target, prompts, config):
    """Return distributions `[N, V]` that the draft's tokens come from while it decodes."""
    distributions = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(heads.proposers.chain_builder, "rule_for", lambda _: NotingRule(distributions))
        decode(target, requests_for(prompts), config, proposer)
    return torch.cat(distributions)


def rule_of(kind, probs_NV):
    """Return a rule that is of two minds about such distributions."""
    if kind == "entropy":
        return EntropyStopping(rule="entropy", threshold=float(torch.special.entr(probs_NV).sum(-1).median()))
    low, middle, high = probs_NV.amax(-1).double().quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    if kind == "confidence":
        return ConfidenceStopping(rule="confidence", threshold=middle)
    ends = [CalibrationPoint(confidence=low, acceptance=0.02), CalibrationPoint(confidence=high, acceptance=0.98)]
    rows = [10.0, 12.0, 14.0, 16.0, 18.0]
    return CostStopping(
        rule="cost", draft_step_milliseconds=0.5, target_step_milliseconds=rows, calibration=ends, acceptance=0.5
    )


def varies(generations, config):
    """Whether rounds that had room for equally many drafts drafted unequally many."""
    lengths = defaultdict(set)
    for generation in generations:
        room = config.max_new_tokens - 2  # the prefill's token is there, and each round adds one of the target's own
        for round_ in generation.rounds:
            lengths[min(room, config.num_speculative_tokens)].add(len(round_.drafted))
            room -= len(round_.committed)
    return any(len(seen) > 1 for seen in lengths.values())


@families
def test_greedy_output_is_plain_greedy_output(wide_target, name, kind):
    target = wide_target
    plain, _ = decode(target, requests_for(PROMPTS), DecodeConfig(num_speculative_tokens=0, max_new_tokens=16))
    proposer = proposer_of(name, target)
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=16)
    config = config.model_copy(update={"stopping": rule_of(kind, distributions_of(proposer, target, PROMPTS, config))})
    together = assert_same_alone(target, config, proposer, PROMPTS)
    assert [each.tokens for each in together] == [each.tokens for each in plain]
    assert varies(together, config)


@families
def test_sampled_tokens_follow_the_targets_distribution(target, distribution, name, kind):
    proposer = proposer_of(name, target)
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=7, temperature=1.2)
    config = config.model_copy(update={"stopping": rule_of(kind, distributions_of(proposer, target, [(1, 2)] * 50, config))})
    generations, _ = decode(target, requests_for([(1, 2)] * 1500), config, proposer)
    assert varies(generations, config)
    assert samples_against(distribution, generations).p_value > 1e-4


@pytest.mark.parametrize("name", ["eagle3", "hydra", "mtp"])
def test_a_chain_of_features_saves_the_steps_behind_the_last_row_that_drafts(target, name, monkeypatch):
    steps, depths = {}, []
    read = FeatureChain._read

    def counted(self, features_BTF, ids_BT, starts, depth, attention=None):
        depths.append(depth)
        return read(self, features_BTF, ids_BT, starts, depth, attention)

    monkeypatch.setattr(FeatureChain, "_read", counted)
    proposer = proposer_of(name, target)
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=16)
    for stopping in (None, rule_of("confidence", distributions_of(proposer, target, PROMPTS, config))):
        depths.clear()
        config = config.model_copy(update={"stopping": stopping})
        (generation,), _ = decode(target, requests_for(PROMPTS[:1]), config, proposer)
        steps[stopping is not None] = len(depths)
        assert len(depths) == sum(len(round_.drafted) for round_ in generation.rounds)
    assert steps[True] != steps[False]

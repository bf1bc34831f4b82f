"""Settings come to one verification rule and one way to choose drafts, and those that contradict each other are refused."""

import pytest
from pydantic import ValidationError

from configs.schema.decoding import DecodeConfig, ParticleSampling, TypicalAcceptance
from configs.schema.drafting import ConfidenceStopping, DynamicTree, StaticTree
from configs.schema.training import HeldOutDecodingConfig

GROWN = DynamicTree(kind="dynamic")
TYPICAL = TypicalAcceptance(kind="typical")
SMC = ParticleSampling(kind="smc")


def static(candidates="without_replacement"):
    return StaticTree(kind="static", branching=[2], candidates=candidates)


@pytest.mark.parametrize(
    ("settings", "rule", "draws"),
    [
        ({}, "block", True),
        ({"temperature": 0.0}, "greedy", False),
        ({"verification": "token"}, "token", True),
        ({"verification": "match"}, "match", False),
        ({"tree": static()}, "without_replacement", True),
        ({"tree": static("with_replacement")}, "with_replacement", True),
        ({"tree": static("k_seq")}, "k_seq", True),
        ({"tree": static(), "verification": "match"}, "match", False),
        ({"lossy": TYPICAL}, "typical", False),
        ({"lossy": TYPICAL, "tree": static()}, "typical", False),
        ({"temperature": 0.0, "tree": GROWN}, "greedy", False),
        ({"lossy": SMC}, "smc", True),
    ],
)
def test_settings_come_to_a_rule(settings, rule, draws):
    config = DecodeConfig(**{"temperature": 1.0} | settings)
    assert (config.rule, config.draws) == (rule, draws)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tree": static(), "verification": "block"}, "judges chains only"),
        ({"tree": GROWN, "verification": "match"}, "tree"),
        ({"lossy": TYPICAL, "temperature": 0.0}, "nothing to relax at temperature 0"),
        ({"lossy": SMC, "verification": "block"}, "takes the place of verification block"),
        ({"lossy": SMC, "tree": static()}, "set tree and stopping to null"),
        ({"lossy": SMC, "stopping": ConfidenceStopping(rule="confidence")}, "set tree and stopping to null"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        DecodeConfig(**{"temperature": 1.0} | settings)


def test_checkpoints_are_not_chosen_by_a_lossy_rule():
    with pytest.raises(ValidationError, match=r"decode\.lossy must be null"):
        HeldOutDecodingConfig(decode=DecodeConfig(temperature=1.0, lossy=TYPICAL))


def test_a_temperature_by_which_no_logit_can_be_divided_is_refused():
    with pytest.raises(ValidationError, match="temperature must be 0"):
        DecodeConfig(temperature=9e-5)
    assert DecodeConfig(temperature=1e-4).rule == "block"

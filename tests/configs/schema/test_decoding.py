"""Settings come to one verification rule and one way to choose drafts, and those that contradict each other are refused."""

import pytest
from pydantic import ValidationError

from configs.runtime.errors import ConfigError
from configs.runtime.loading import load_config
from configs.schema.decoding import DecodeConfig, ParticleSampling, TypicalAcceptance
from configs.schema.drafting import DynamicTree, EntropyStopping, StaticTree
from configs.schema.evaluation import EvalConfig
from configs.schema.training import HeldOutDecodingConfig

GROWN = DynamicTree(kind="dynamic")
TYPICAL = TypicalAcceptance(kind="typical")
DRAWN = TypicalAcceptance(kind="typical", drafts="drawn")
SMC = ParticleSampling(kind="smc")


def static(candidates=None):
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
        ({"tree": static("top_k")}, "match", False),
        ({"tree": static(), "verification": "match"}, "match", False),
        ({"tree": GROWN}, "match", False),
        ({"lossy": TYPICAL}, "typical", False),
        ({"lossy": DRAWN}, "typical", True),
        ({"lossy": DRAWN, "tree": static("k_seq")}, "typical", True),
        ({"lossy": TYPICAL, "tree": GROWN}, "typical", False),
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
        ({"tree": static("k_seq"), "verification": "match"}, "k_seq are drawn"),
        ({"tree": GROWN, "verification": "token"}, "set verification to match"),
        ({"lossy": TYPICAL, "temperature": 0.0}, "nothing to relax at temperature 0"),
        ({"lossy": SMC, "verification": "block"}, "takes the place of verification block"),
        ({"lossy": SMC, "tree": static()}, "set tree and stopping to null"),
        ({"lossy": SMC, "stopping": EntropyStopping(rule="entropy")}, "set tree and stopping to null"),
        ({"lossy": DRAWN, "tree": GROWN}, "set lossy.drafts to likeliest"),
        ({"lossy": TYPICAL, "tree": static("k_seq")}, "contradict each other"),
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


COST = "rule: cost, draft_step_milliseconds: 1, target_step_milliseconds: [10, 10, 11, 12]"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "{rule: cost, draft_step_milliseconds: 1, target_step_milliseconds: [10, 11]}",
            "stopping.target_step_milliseconds must have 4 entries or more, for 1 to 4 rows",
        ),
        (f"{{{COST}, calibration: []}}", "calibration needs at least one point"),
        *(
            (
                f"{{{COST}, calibration: [{{confidence: 0.5, acceptance: 0.5}}, {{confidence: {sure}, acceptance: {kept}}}]}}",
                f"calibration must rise in confidence and not fall in acceptance, got {sure}: {kept} after 0.5: 0.5",
            )
            for sure, kept in ((0.4, 0.6), (0.6, 0.4))
        ),
    ],
)
def test_a_stopping_rule_that_cannot_be_is_refused_in_one_sentence(text, complaint):
    with pytest.raises(ConfigError) as refusal:
        load_config(EvalConfig, None, [f"decode.stopping={text}"])
    assert complaint in str(refusal.value)

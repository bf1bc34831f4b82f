"""What a stopping rule's settings may say, and how a mistake in them is answered."""

import pytest

from configs.runtime.errors import ConfigError
from configs.runtime.loading import load_config
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import CostStopping, EntropyStopping
from configs.schema.evaluation import EvalConfig

COST = "rule: cost, draft_step_milliseconds: 1, target_step_milliseconds: [10, 10, 11, 12]"


@pytest.fixture
def stopping_of(tmp_path):
    """A function that reads the `decode.stopping` section of a file."""

    def read(text):
        file = tmp_path / "eval.yaml"
        file.write_text(f"decode: {{stopping: {text}}}")
        return load_config(EvalConfig, file).decode.stopping

    return read


def test_drafts_stop_early_only_where_that_is_asked_for(stopping_of):
    assert DecodeConfig().stopping is stopping_of("null") is None
    assert stopping_of("{rule: entropy, threshold: 1.5}") == EntropyStopping(rule="entropy", threshold=1.5)
    assert load_config(EvalConfig, None, ["decode.stopping.rule=confidence"]).decode.stopping.threshold == 0.4


def test_confidences_are_taken_at_their_word_unless_a_calibration_is_given(stopping_of):
    assert [(point.confidence, point.acceptance) for point in stopping_of(f"{{{COST}}}").calibration] == [(0, 0), (1, 1)]
    given = stopping_of(f"{{{COST}, calibration: [{{confidence: 0.5, acceptance: 0.2}}]}}")
    assert isinstance(given, CostStopping)
    assert [(point.confidence, point.acceptance) for point in given.calibration] == [(0.5, 0.2)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{rule: confidnce}", "decode.stopping.rule: expected one of 'confidence', 'entropy', 'cost', got 'confidnce'"),
        ("{threshold: 0.5}", "'decode.stopping.rule' is missing"),
        ("{rule: entropy, treshold: 1}", "unknown key 'decode.stopping.treshold'; the nearest known key is"),
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
def test_a_rule_that_cannot_be_is_refused_in_one_sentence(stopping_of, text, complaint):
    with pytest.raises(ConfigError) as refusal:
        stopping_of(text)
    assert complaint in str(refusal.value)

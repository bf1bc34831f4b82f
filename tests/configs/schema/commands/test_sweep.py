"""What a sweep's config says: its cells, and what it refuses."""

import pytest
from pydantic import ValidationError

from configs.runtime.errors import ConfigError
from configs.runtime.loading import load_config
from scripts.lab.recipe_sweep.settings import SweepConfig

AXES = {
    "divergences": {"a": {}, "b": {"divergence": "jsd"}},
    "policies": {"x": {}, "y": {"phases": [{"on_policy": 0.5}]}, "z": {}},
}


def test_along_the_axes_every_name_stands_beside_the_first_of_the_other_axis_and_across_all_pairs_meet():
    assert SweepConfig(**AXES, cells="axes").pairs == [("a", "x"), ("b", "x"), ("a", "y"), ("a", "z")]
    assert SweepConfig(**AXES, cells="cross").pairs == [(divergence, policy) for divergence in "ab" for policy in "xyz"]


def test_settings_may_be_dotted_or_in_sections_and_the_command_line_has_the_last_word(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("settings: {schedule.max_steps: 60, student: {draft_vocab_size: null}}\n")
    # The last one only begins like a key that is the sweep's own.
    config = load_config(SweepConfig, path, ["settings.schedule.max_steps=30", "settings.loss_scale=1"])
    assert config.settings == {"schedule.max_steps": 30, "student.draft_vocab_size": None, "loss_scale": 1}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"divergences": {}}, "divergences is empty, so that there is no cell to train"),
        ({"policies": {"on policy": {}}}, "policies has the name 'on policy'; expected letters, digits, - and _ only"),
        (
            {"settings": {"loss.divergence": "jsd"}},
            "settings.loss.divergence is for the sweep to decide: give it under divergences",
        ),
        ({"settings": {"policy": {"temperature": 1.0}}}, "settings.policy.temperature is for the sweep to decide"),
        ({"settings": {"output": "runs/x"}}, "settings.output is for the sweep to decide: give output of the sweep"),
        ({"settings": {"schedule": {"resume": True}}}, "a cell that was cut off begins anew"),
        ({"settings": {"student.layers": [0, 1]}}, "student.layers must be a single value, not a list"),
        ({"temperatures": []}, "temperatures must be at least one"),
        ({"temperatures": [1.0, 1.0]}, "each another, got"),
    ],
)
def test_what_cannot_be_swept_is_refused(settings, rule):
    with pytest.raises(ValidationError, match=rule):
        SweepConfig(**settings)


def test_a_policy_of_the_sweep_obeys_the_rules_of_policies(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("policies: {late: {phases: [{from_share: 0.5}]}}\n")
    with pytest.raises(ConfigError, match=r"policies\.late: the first phase must have from_share 0"):
        load_config(SweepConfig, path)

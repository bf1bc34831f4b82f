"""What a run finds out of a target's config and a machine's memory."""

import pytest

from configs.schema.commands.planning import HardwareConfig
from configs.schema.commands.running import RunConfig
from configs.schema.target import TargetConfig
from scripts.pipeline import request


@pytest.mark.parametrize(
    ("name", "number", "changed"),
    [
        ("configs/plan/llama_8b", 1, {}),
        ("configs/plan/llama_70b", 8, {"train.schedule.batch_size": 4, "train.schedule.gradient_accumulation_steps": 2}),
    ],
)
def test_a_batch_that_does_not_fit_is_taken_in_parts(name, number, changed, monkeypatch):
    gpus = HardwareConfig(preset="h100_80gb", num_accelerators=number, accelerators_per_node=number)
    monkeypatch.setattr(request, "hardware", lambda: gpus)
    plan, choices = request._recipe(RunConfig(target=TargetConfig(name=name)))
    assert plan.fitting is not None
    assert {each.key: each.value for each in choices} == {"recipe": request.HEAD, **changed}

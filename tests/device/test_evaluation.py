"""Evaluation and export on a device that is not the CPU: what the CPU decodes and writes, also where the device is full."""

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from configs.schema.evaluation import LosslessConfig
from configs.schema.target import TargetConfig
from eval.decoder.records import RECORDS, read_records
from eval.evaluation import evaluate
from tests.support.evaluations import report_in, tiny_evaluation

pytestmark = pytest.mark.device

WAYS = {"greedy": {}, "drawn tree": {"temperature": 1.0, "top_p": 0.9, "tree": {"kind": "static", "branching": [2, 2]}}}


def evaluated(tiny_run, folder, device, way):
    """Evaluate the tiny run on a device, by name; return the report and what was decoded, by mode and prompt."""
    AcceleratorState._reset_state(reset_partial_state=True)
    target = TargetConfig(name=str(tiny_run / "target"), dtype="float32", device=device)
    lossless = LosslessConfig(first_token_samples=0)
    config = tiny_evaluation(tiny_run, folder, num_prompts=4, decode=WAYS[way], target=target, lossless=lossless)
    evaluate(config)
    AcceleratorState._reset_state(reset_partial_state=True)
    records = read_records(Path(config.output) / RECORDS)
    return report_in(config), {(each.mode, each.prompt_id): each.tokens for each in records.generations}


@pytest.mark.parametrize("way", WAYS)
def test_a_report_says_of_the_device_what_it_says_of_the_cpu(mock, tiny_run, way, tmp_path):
    (here, expected), (there, decoded) = (evaluated(tiny_run, tmp_path / name, name, way) for name in ("cpu", "auto"))
    assert there.hardware["device"] == str(mock)
    assert decoded == expected
    assert there.acceptance.tokens_per_target_step == here.acceptance.tokens_per_target_step
    assert there.lossless.verdict == here.lossless.verdict
    assert there.lossless.failed_checks == []

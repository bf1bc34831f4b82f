"""Evaluation and export on a device that is not the CPU: what the CPU decodes and writes, also where the device is full."""

import copy
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from configs.schema.evaluation import LosslessConfig
from configs.schema.target import TargetConfig
from eval.evaluation import evaluate
from eval.measure.record_files import RECORDS, read_records
from heads.artifact import load_draft
from heads.formats.exporting.exporter import export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.frozen.loading import load_target
from heads.metadata import WEIGHTS_FILE
from tests.support import family_checks as checks
from tests.support.artifacts import save_artifact
from tests.support.decoding import HEADS
from tests.support.evaluations import report_in, tiny_evaluation

pytestmark = pytest.mark.device

WAYS = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "top_p": 0.9},
    "tree": {"temperature": 1.0, "tree": {"kind": "static", "branching": [2, 2]}},
}


@pytest.fixture
def evaluated(tiny_run, tmp_path):
    """A function that evaluates the tiny run on a device, by name; returns its report and what was decoded, by mode."""

    def run(device, way, **others):
        AcceleratorState._reset_state(reset_partial_state=True)
        target = TargetConfig(name=str(tiny_run / "target"), dtype="float32", device=device)
        lossless = LosslessConfig(first_token_samples=0)
        config = tiny_evaluation(
            tiny_run, tmp_path / device / way, num_prompts=4, decode=WAYS[way], target=target, lossless=lossless, **others
        )
        evaluate(config)
        records = read_records(Path(config.output) / RECORDS)
        decoded = {(each.mode, each.prompt_id): each.tokens for each in records.generations}
        return report_in(config), decoded

    yield run
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_report_says_of_the_device_what_it_says_of_the_cpu(mock, evaluated, way):
    (here, expected), (there, decoded) = (evaluated(device, way) for device in ("cpu", "auto"))
    assert there.hardware["device"] == str(mock)
    assert decoded == expected
    assert there.acceptance.tokens_per_target_step == here.acceptance.tokens_per_target_step
    assert there.lossless.verdict == here.lossless.verdict
    assert there.lossless.failed_checks == []


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_an_artifact_of_a_head_on_the_device_is_loaded_there_and_exported_as_the_cpus(mock, tiny_tokenizer, tmp_path, name):
    folder, written = tmp_path / "target", {}
    copy.deepcopy(checks.tiny_target("llama")).float().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    for device in ("cpu", "auto"):
        target = load_target(TargetConfig(name=str(folder), dtype="float32", device=device))
        head = checks.build(HEADS[name], target.model, checks.SOME_TOKENS).to(target.device).requires_grad_(False)
        save_artifact(tmp_path / device, head, target.identity.to_dict(), checks.SOME_TOKENS)
        draft = load_draft(str(tmp_path / device), target.identity, target.model)
        assert {each.device.type for each in draft.proposer.module.parameters()} == {target.device.type}
        out = tmp_path / f"{device}, exported"
        export(read_source(tmp_path / device, TargetFolder(folder, str(folder))), "vllm", out)
        written[device] = load_file(out / WEIGHTS_FILE)
    assert written["cpu"].keys() == written["auto"].keys()
    assert all(written["cpu"][key].equal(written["auto"][key]) for key in written["cpu"])

"""What commit 5cdfbcc wrote still loads: artifacts, checkpoints, data, a cache, a report and its records.

`written_before/` was made on a tiny target by that commit's commands. The configs are resolved ones, with every key it had.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from configs.runtime.command import run_command
from configs.runtime.loading import load_config
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import GateConfig
from configs.schema.target import TargetConfig
from configs.schema.training import DistillConfig, HeadsConfig
from eval import gate
from eval.decoder.decode import decode
from eval.decoder.records import Generation
from eval.decoder.request import Request
from eval.measure.record_files import read_records
from heads.artifact import load_draft
from heads.frozen.loading import load_target
from train.launch import run_distillation, run_heads

WRITTEN = Path(__file__).with_name("written_before")
TRAININGS = {"distill": (DistillConfig, run_distillation), "heads": (HeadsConfig, run_heads)}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A copy of the folder, as the current one: the configs and artifacts name the target by a relative path."""
    folder = shutil.copytree(WRITTEN, tmp_path / "written")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("kind", ["draft_lm", "eagle3"])
def test_an_artifact_loads_and_decodes_the_recorded_tokens(written, kind):
    records = [each for each in read_records(written / "records.jsonl") if isinstance(each, Generation)]
    plain = [each for each in records if each.mode == "autoregressive"]
    target = load_target(TargetConfig(name="target", dtype="float32", device="cpu"))
    draft = load_draft(written / "artifacts" / kind, target.identity, target.model)
    requests = [Request(prompt_id=each.prompt_id, category="old", tokens=tuple(each.prompt_tokens)) for each in plain]
    config = DecodeConfig(num_speculative_tokens=2, max_new_tokens=12, batch_size=len(requests))
    again, _ = decode(target, requests, config, draft.proposer)
    assert len(plain) == 4
    assert [each.tokens for each in again] == [each.tokens for each in plain]


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_run_goes_on_from_its_checkpoint_to_the_recorded_weights(written, kind, caplog):
    schema, run = TRAININGS[kind]
    config = load_config(schema, written / f"{kind}.yaml")
    checkpoints = Path(config.output) / "checkpoints"
    shutil.copytree(written / "checkpoints" / kind, checkpoints)
    with caplog.at_level("INFO"):
        assert run(config) == 0
    assert "resumed from" in caplog.text
    ours = load_file(checkpoints / "step-00000006" / "model.safetensors")
    recorded = load_file(written / "final" / f"{kind}.safetensors")
    assert ours.keys() == recorded.keys()
    for name, value in recorded.items():
        assert (ours[name] - value).abs().max() <= 1e-4 * value.abs().max().clamp(min=1e-3), name


def test_training_reads_a_cache(written):
    config = load_config(
        DistillConfig, written / "distill.yaml", ["data.cache=cache", "schedule.max_steps=2", "output=runs/cached"]
    )
    assert run_distillation(config) == 0


def test_a_report_is_judged_and_its_artifact_recognised(written, capsys):
    argv = ["report.json", "--artifact", "artifacts/draft_lm", "--set", "min_prompts=2"]
    assert run_command(GateConfig, gate.main, description="", argv=argv, add_arguments=gate.add_arguments) == 0
    assert "gate: pass" in capsys.readouterr().out

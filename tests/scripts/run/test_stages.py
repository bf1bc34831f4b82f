"""What each stage of a run is told: its config, or its arguments."""

import json
from pathlib import Path

import pytest

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.files import write_text
from configs.runtime.loading import load_config
from configs.schema.base import dotted
from configs.schema.commands.running import RunConfig
from configs.schema.evaluation import SuiteConfig
from configs.schema.target import TargetConfig
from configs.schema.training import training_schema
from eval.report.schema import load_report, write_report
from scripts.run import stages
from scripts.run.draft_file import write_draft_file
from tests.support.reports import changed

TARGET = {"target.name": "ann/model", "target.dtype": "float32"}
SUITE = SuiteConfig(name="house", path="eval/suites/house64.jsonl", on_too_long="skip")
ASKED = {
    "target": {"name": "ann/model", "dtype": "float32"},
    "prompts": {"source": "file", "path": "asked.jsonl", "num_prompts": 90},
    "data": {"answers.max_new_tokens": 64},
    "cache": {"taps": [1, 2], "max_length": 300},
    "train": {"schedule.epochs": 4},
    "eval": {"suite.num_prompts": 8},
    "output": "runs/mine",
}
TOLD = {
    "data": {
        **TARGET,
        "prompts.source": "file",
        "prompts.path": "asked.jsonl",
        "prompts.num_prompts": 90,
        "answers.max_new_tokens": 64,
        "output": "runs/mine/data",
    },
    "cache": {**TARGET, "data": "runs/mine/data/train.jsonl", "taps": [1, 2], "max_length": 300, "output": "runs/mine/cache"},
    "train": {
        **TARGET,
        "data.train": "runs/mine/data/train.jsonl",
        "data.held_out": "runs/mine/data/held_out.jsonl",
        "data.cache": "runs/mine/cache",
        "schedule.epochs": 4,
        "output": "runs/mine/train",
    },
    "eval": {
        **TARGET,
        "draft": "runs/mine/train/artifact",
        "suite.name": "home",
        "suite.path": "runs/mine/data/held_out.jsonl",
        "suite.num_prompts": 8,
        "suites": [SUITE.model_dump(mode="json")],
        "baselines": ["prompt_lookup", "suffix_lookup"],
        "lookup_answers": "runs/mine/data/train.jsonl",
        "output": "runs/mine/eval",
        "overwrite": True,
    },
    "gate": {},
}


def told(run, stage):
    """Return what a stage's config has that its command's defaults, or the recipe, do not have."""
    config = stages.stage_config(run, stage)
    recipe = {"train": run.recipe, "gate": run.gate}.get(stage)
    usual = load_config(training_schema(recipe) if stage == "train" else type(config), recipe)
    before = dict(dotted(usual.model_dump(mode="json")))
    now = dict(dotted(config.model_dump(mode="json")))
    return {key: value for key, value in now.items() if key not in before or before[key] != value}


def test_every_stage_config_is_what_the_run_says_and_no_more():
    run = RunConfig.model_validate(ASKED)
    assert {stage: told(run, stage) for stage in TOLD} == TOLD


def test_a_refresh_trains_the_served_draft_on_with_the_mixed_data_and_measures_both(tmp_path):
    run = RunConfig.model_validate(ASKED | {"refresh": {"served": str(tmp_path)}})
    mixed = {"data.train": "runs/mine/mix/train.jsonl", "data.held_out": "runs/mine/mix/held_out.jsonl"}
    measured = TOLD["eval"] | {"suite.path": "runs/mine/mix/suite.jsonl", "lookup_answers": "runs/mine/mix/train.jsonl"}
    alone = {"draft": str(tmp_path), "baselines": [], "lookup_answers": None, "output": "runs/mine/baseline"}
    expected = {
        "data": TOLD["data"] | {"prompts.path": "runs/mine/log/prompts.jsonl", "prompts.on_too_long": "skip"},
        "cache": TOLD["cache"] | {"data": "runs/mine/mix/train.jsonl"},
        "train": TOLD["train"] | mixed | {"init": str(tmp_path)},
        "baseline": {key: value for key, value in (measured | alone).items() if value is not None},
        "eval": measured,
    }
    assert {stage: told(run, stage) for stage in expected} == expected
    lm = run.model_copy(update={"recipe": "configs/distill/draft_lm.yaml", "train": None})
    student = stages.stage_config(lm, "train").student
    assert (student.init, student.path, student.layers) == ("model", str(tmp_path), None)
    baseline = stages.stage_command(run.model_copy(update={"output": str(tmp_path)}), "gate")[-2:]
    assert baseline == ["--baseline", str(tmp_path / "baseline" / "report.json")]


@pytest.mark.parametrize(("engine", "written"), [("vllm", ["vllm", "suffix_lookup"]), ("sglang", ["sglang"])])
def test_vllm_gets_suffix_lookup_beside_the_draft(tmp_path, monkeypatch, engine, written):
    called = []
    monkeypatch.setattr(stages, "run_step", lambda arguments: called.append(arguments) or DONE)
    run = RunConfig(target=TargetConfig(name="base"), output=str(tmp_path), engine=engine)
    assert stages.run_stage(run, "export") == DONE
    assert [Path(arguments[arguments.index("--out") + 1]).name for arguments in called] == written
    assert [arguments[2] for arguments in called][1:] == [str(tmp_path / "data" / "train.jsonl")] * (len(written) - 1)


@pytest.mark.parametrize(
    ("engine", "ratio", "recommended", "code"),
    [
        ("vllm", 1.2, "vllm", DONE),
        ("vllm", 0.9, "suffix_lookup", DONE),
        ("sglang", 1.2, "sglang", DONE),
        ("sglang", 0.9, None, GATE_FAILED),
        (None, 0.9, None, DONE),
    ],
)
def test_a_run_ends_well_only_where_the_export_that_it_recommends_is_the_faster_one(
    measured, tmp_path, monkeypatch, engine, ratio, recommended, code
):
    """The draft has `ratio` the speed of suffix lookup, which is exported for vLLM alone."""
    report = load_report(measured / "evaluation" / "report.json")
    lookup = report.baselines["prompt_lookup"].model_dump() | {"decode_speedup": 9.0, "decode_speed_ratio": ratio}
    lookup |= {"decode_speed_ratio_ci": None}
    write_report(tmp_path / "eval" / "report.json", changed(report, {"baselines.suffix_lookup": lookup}))
    for name in (engine, "suffix_lookup")[: 2 if engine == "vllm" else 1]:
        write_text(tmp_path / "export" / str(name) / "serve.txt", f"{name}\n")
    monkeypatch.setattr(stages, "run_step", lambda arguments: DONE)
    assert stages.run_stage(RunConfig(output=str(tmp_path), engine=engine), "gate") == code
    lines = tmp_path / "export" / "serve.txt"
    assert (lines.read_text().splitlines()[-1] if lines.exists() else None) == recommended


@pytest.mark.parametrize("name", ["ann/target", "embedded:smollm2-135m-instruct", "here"])
def test_an_export_finds_a_target_on_the_hub_by_the_artifact_with_its_revision(tmp_path, name):
    folder = {"here": str(tmp_path)}.get(name)
    run = RunConfig(target=TargetConfig(name=folder or name), output=str(tmp_path), engine="vllm")
    assert stages.stage_command(run, "export")[7:] == ([] if folder is None else ["--target", folder])


def test_the_engine_gets_the_chat_template_that_the_draft_was_trained_with(tmp_path):
    template = {"chat_template": "plain", "chat_template_kwargs": {"enable_thinking": False}, "trust_remote_code": True}
    run = RunConfig(target=TargetConfig(name="base", **template), output=str(tmp_path))
    assert stages.stage_command(run, "export")[-2:] == ["--set", "trust_remote_code=true"]
    assert stages.stage_command(run, "check")[-1] == str(tmp_path / "configs" / "check.json")
    assert json.loads((tmp_path / "configs" / "check.json").read_text()).items() >= template.items()


@pytest.mark.parametrize("asked", [{}, {"cache": None}, {"cache": {}}])
def test_a_cache_that_was_asked_for_or_forbidden_is_still_so_when_the_file_is_read(asked, tmp_path):
    kept = load_config(RunConfig, write_draft_file(RunConfig(output=str(tmp_path), **asked)))
    assert ("cache" in kept.model_fields_set, kept.cache) == ("cache" in asked, asked.get("cache"))

"""The stages of a run: each is a command of the project, called with a config that is written into `OUTPUT/configs`."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.runtime.command import DONE
from configs.runtime.files import read_jsonl, write_json
from configs.runtime.loading import as_overrides, load_config
from configs.schema.commands.release import Engine
from configs.schema.commands.running import RunConfig, Stage
from configs.schema.data import CacheConfig, DataConfig
from configs.schema.evaluation import EvalConfig, GateConfig, SuiteConfig
from configs.schema.target import TargetConfig
from configs.schema.training import DistillConfig, HeadsConfig, training_schema
from scripts.check.vllm_server import find_vllm
from scripts.run.steps import GATE_ENTRY, LAUNCH, Step, run_step, run_steps

TITLES: dict[Stage, str] = {
    "rehearsal": "every stage once in small",
    "data": "the target answers the prompts",
    "cache": "the target's states on the answers, computed once",
    "train": "train the draft",
    "eval": "decode with the draft and without it",
    "gate": "the verdict",
    "export": "write the draft as the engine loads it",
    "check": "decode with the draft in the engine",
}
ENTRIES: dict[type[BaseModel], str] = {
    DataConfig: "scripts/data.py",
    CacheConfig: "scripts/cache.py",
    DistillConfig: "train/distill.py",
    HeadsConfig: "train/heads.py",
    EvalConfig: "eval/run.py",
    GateConfig: GATE_ENTRY,
}
HOUSE = {"name": "house", "path": "eval/suites/house64.jsonl", "on_too_long": "truncate"}


def stage_config(run: RunConfig, stage: Stage) -> BaseModel | None:
    """Return the config that a stage's command is given; None where it takes arguments alone."""
    output, held_out = Path(run.output), Path(run.output) / "data" / "held_out.jsonl"
    given: dict[str, Any]
    target = {"target": run.stage_target.model_dump(mode="json")}
    train_file = str(output / "data" / "train.jsonl")
    if stage == "data":
        given = {**target, "prompts": run.prompts.model_dump(mode="json"), "output": str(output / "data")}
        return _load(DataConfig, None, given, run.data)
    if stage == "cache":
        return _load(CacheConfig, None, {**target, "data": train_file, "output": str(output / "cache")}, run.cache)
    if stage == "train":
        given = {**target, "data.train": train_file, "data.held_out": str(held_out), "output": str(output / "train")}
        given["data.cache"] = None if run.cache is None else str(output / "cache")
        return _load(training_schema(run.recipe), run.recipe, given, run.train)
    if stage == "eval":
        given = {**target, "draft": str(output / "train" / "artifact"), "output": str(output / "eval"), "overwrite": True}
        given |= {"suite.name": "home", "suite.path": str(held_out), "suites": [HOUSE]}
        given |= {"baselines": ["prompt_lookup", "suffix_lookup"], "lookup_answers": train_file}
        return _load(EvalConfig, None, given, run.eval)
    if stage == "gate":
        return load_config(GateConfig, run.gate)
    return None


def _load(schema: type[BaseModel], recipe: str | None, given: dict[str, Any], changes: dict[str, Any] | None) -> BaseModel:
    return load_config(schema, recipe, [*as_overrides(given), *as_overrides(changes or {})])


def stage_command(run: RunConfig, stage: Stage) -> list[str]:
    """Write the config of a stage, and return the arguments of Python that run it."""
    output, config = Path(run.output), stage_config(run, stage)
    if config is None:
        return _arguments_alone(run, stage)
    if isinstance(config, EvalConfig) and (held_out := Path(config.suite.path)).is_file():
        config = config.model_copy(update={"suite": _no_more_than_there_are(config.suite, held_out)})
    path = output / "configs" / f"{stage}.json"
    write_json(path, config.model_dump(mode="json"))
    command = [ENTRIES[type(config)], "--config", str(path)]
    if stage == "gate":
        report, artifact = output / "eval" / "report.json", output / "train" / "artifact"
        return [GATE_ENTRY, str(report), *command[1:], "--artifact", str(artifact)]
    together = run.target.is_split  # processes that share the target
    if stage == "train" or (run.num_processes > 1 and (stage != "eval" or together)):
        return [*LAUNCH, run.launcher, "--num_processes", str(run.num_processes), *command]
    return command


def _no_more_than_there_are(suite: SuiteConfig, held_out: Path) -> SuiteConfig:
    """Return a suite of as many prompts as the data hold out at most: those that are too long were left out of them."""
    there = len({row["prompt_id"] for _, row in read_jsonl(held_out, "data")})
    return suite.model_copy(update={"num_prompts": min(suite.num_prompts or there, there)})


def _arguments_alone(run: RunConfig, stage: Stage) -> list[str]:
    output, engine = Path(run.output), str(run.engine)
    folder = str(output / "export" / engine)
    if stage == "export":
        return _export(run, output / "train" / "artifact", folder)
    prompts, out = str(output / "data" / "held_out.jsonl"), str(output / "check")
    template = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key in ("chat_template", "chat_template_kwargs")
        if (value := getattr(run.target, key)) is not None
    ]
    given = ["--set", *template] if template else []
    return ["-m", "scripts.check", folder, "--engine", engine, "--prompts", prompts, "--out", out, *given]


def _export(run: RunConfig, what: Path, folder: str) -> list[str]:
    return ["-m", "scripts.export", str(what), "--to", str(run.engine), "--out", folder, *target_folder(run.stage_target)]


def target_folder(target: TargetConfig) -> list[str]:
    """Return the option by which an export finds a target in a folder; others it finds by the artifact, with their revision."""
    return ["--target", target.name] if Path(target.name).exists() else []


def make_step(run: RunConfig, stage: Stage) -> Step:
    """Return a stage as a step that is run once."""
    folder = {"gate": None, "export": Path(run.output) / "export"}.get(stage, Path(run.output) / stage)

    def call() -> int:
        arguments = stage_command(run, stage)
        print(f"   {shlex.join(['python', *arguments])}", flush=True)
        if stage in ("export", "check"):  # of a run that was cut off
            shutil.rmtree(Path(run.output) / stage, ignore_errors=True)
        code = run_step(arguments)
        if stage == "export" and run.engine == "vllm" and code == DONE:  # no other engine takes a lookup of ours
            lookup = str(Path(run.output) / "export" / "suffix_lookup")
            code = run_step(_export(run, Path(run.output) / "data" / "train.jsonl", lookup))
        return code

    return Step(
        name=stage,
        title=TITLES[stage],
        folder=folder,
        decided_by=decided_by(run, stage),
        run=call,
        judges=stage in ("gate", "check"),
    )


def decided_by(run: RunConfig, stage: Stage) -> Any:
    """Return what decides a stage's results, besides the stages before it: where the output lies does not."""
    if stage == "check":
        return [stage, run.engine, is_checked_here(run.engine)]
    config = stage_config(run.model_copy(update={"output": "."}), stage)
    return [stage, run.engine if config is None else json.loads(config.model_dump_json())]


def is_checked_here(engine: Engine | None) -> bool:
    """Return whether the engine is installed, so that its check of the export takes time."""
    return engine == "transformers" or (engine == "vllm" and find_vllm(None) is not None)


def run_stages(run: RunConfig, inputs: str, only: Stage | None = None) -> int:
    """Run what is not finished of a run's stages, or of one; return the worst verdict, or the code of the first that fails."""
    steps = [make_step(run, stage) for stage in run.stages if stage != "rehearsal"]
    return run_steps(Path(run.output), steps, inputs, stages=run.stages, planned_minutes=run.minutes, only=only)

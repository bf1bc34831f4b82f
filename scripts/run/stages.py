"""The stages of a run: each is a command of the project, called with a config that is written into `OUTPUT/configs`."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.runtime.command import DONE
from configs.runtime.files import write_json
from configs.runtime.loading import as_overrides, load_config
from configs.runtime.run_record import fingerprint
from configs.schema.commands.release import OF_TARGET, CheckConfig, Engine
from configs.schema.commands.running import RunConfig, Stage
from configs.schema.data import CacheConfig, DataConfig
from configs.schema.evaluation import EvalConfig, GateConfig, SuiteConfig
from configs.schema.training import DistillConfig, HeadsConfig, training_schema
from heads.metadata import locate_artifact
from scripts.check.vllm_server import find_vllm
from scripts.run.mix import mix
from scripts.run.recommendation import recommend
from scripts.run.steps import LAUNCH, SEVERITY, Record, run_step

TITLES: dict[Stage, str] = {
    "dry_run": "every stage once in small, to measure this machine",
    "data": "the target answers the prompts",
    "mix": "the traffic's answers beside some of the old data",
    "cache": "the target's states on the answers, computed once",
    "train": "train the draft",
    "baseline": "measure the served draft",
    "eval": "measure speed and acceptance",
    "export": "write the draft as the engine loads it",
    "check": "decode with the draft in the engine",
    "gate": "the verdict",
}
ENTRIES: dict[type[BaseModel], str] = {
    DataConfig: "scripts/data.py",
    CacheConfig: "scripts/cache.py",
    DistillConfig: "train/distill.py",
    HeadsConfig: "train/heads.py",
    EvalConfig: "eval/run.py",
    GateConfig: "eval/gate.py",
}
HOUSE = {"name": "house", "path": "eval/suites/house64.jsonl", "on_too_long": "skip"}


# --- what a stage is told -----------------------------------------------------------------------------------------


def stage_config(run: RunConfig, stage: Stage) -> BaseModel | None:
    """Return the config that a stage's command is given; None where it takes arguments alone."""
    output = Path(run.output)
    data = output / ("data" if run.refresh is None else "mix")  # what is trained on, and measured
    train_file, held_out = str(data / "train.jsonl"), str(data / "held_out.jsonl")
    given: dict[str, Any] = {"target": run.stage_target.model_dump(mode="json"), "output": str(output / stage)}
    if stage == "data":
        return _load(DataConfig, given | {"prompts": run.stage_prompts.model_dump(mode="json")}, run.data)
    if stage == "cache":
        return _load(CacheConfig, given | {"data": train_file}, run.cache)
    if stage == "train":
        given |= {"data.train": train_file, "data.held_out": held_out, **start_of(run)}
        given["data.cache"] = None if run.cache is None else str(output / "cache")
        return _load(training_schema(run.recipe), given, run.train, run.recipe)
    if stage in ("baseline", "eval"):
        suite = held_out if run.refresh is None else str(data / "suite.jsonl")
        given |= {"draft": str(output / "train" / "artifact"), "overwrite": True, "suites": [HOUSE]}
        given |= {"suite.name": "home", "suite.path": suite, "lookup_answers": train_file}
        config = _load(EvalConfig, given | {"baselines": ["prompt_lookup", "suffix_lookup"]}, run.eval)
        return config if stage == "eval" else _of_served(run, config)
    if stage == "gate":
        return load_config(GateConfig, run.gate)
    if stage == "check":
        return CheckConfig(**{name: getattr(run.target, name) for name in OF_TARGET})
    return None


def start_of(run: RunConfig) -> dict[str, Any]:
    """Return the keys of the recipe that begin the training at the served draft's weights, where there is one."""
    if run.refresh is None:
        return {}
    served = str(locate_artifact(run.refresh.served))
    if training_schema(run.recipe) is HeadsConfig:
        return {"init": served}
    return {"student.init": "model", "student.path": served, "student.layers": None, "student.overrides": None}


def evaluation_of_served(run: RunConfig, suites: Sequence[SuiteConfig], output: Path) -> EvalConfig:
    """Return the config that measures the served draft alone on some suites."""
    given = {"target": run.stage_target.model_dump(mode="json"), "output": str(output), "overwrite": True}
    named = [each.model_dump(mode="json") for each in suites]
    return _of_served(run, _load(EvalConfig, given, {**(run.eval or {}), "suite": named[0], "suites": named[1:]}))


def _of_served(run: RunConfig, config: EvalConfig) -> EvalConfig:
    assert run.refresh is not None
    served = str(locate_artifact(run.refresh.served))
    return config.model_copy(update={"draft": served, "baselines": [], "lookup_answers": None})


def _load(schema: type[Any], given: dict[str, Any], changes: dict[str, Any] | None, recipe: str | None = None) -> Any:
    return load_config(schema, recipe, [*as_overrides(given), *as_overrides(changes or {})])


def stage_command(run: RunConfig, stage: Stage) -> list[str]:
    """Write the config of a stage, and return the arguments of Python that run it."""
    output, config = Path(run.output), stage_config(run, stage)
    if config is None:
        return _export(run, output / "train" / "artifact", str(run.engine))
    path = output / "configs" / f"{stage}.json"
    write_json(path, config.model_dump(mode="json"))
    if isinstance(config, CheckConfig):
        files = ["--prompts", str(output / "data" / "held_out.jsonl"), "--out", str(output / "check"), "--config", str(path)]
        return ["-m", "scripts.check", str(output / "export" / str(run.engine)), "--engine", str(run.engine), *files]
    command = [ENTRIES[type(config)], "--config", str(path)]
    if stage == "gate":
        baseline = [] if run.refresh is None else ["--baseline", str(output / "baseline" / "report.json")]
        return [*command, str(output / "eval" / "report.json"), "--artifact", str(output / "train" / "artifact"), *baseline]
    together = run.target.is_split  # processes that share the target
    if stage == "train" or (run.num_processes > 1 and (stage not in ("baseline", "eval") or together)):
        return [*LAUNCH, run.launcher, "--num_processes", str(run.num_processes), *command]
    return command


def _export(run: RunConfig, what: Path, name: str) -> list[str]:
    """Return the command of an export; a target that is no folder it finds by the artifact, with its revision."""
    target = run.stage_target.name
    folder = str(Path(run.output) / "export" / name)
    named = ["--target", target] if Path(target).exists() else []
    trusting = ["--set", "trust_remote_code=true"] if run.target.trust_remote_code else []
    return ["-m", "scripts.export", str(what), "--to", str(run.engine), "--out", folder, *named, *trusting]


# --- running them ---------------------------------------------------------------------------------------------------


def run_stages(run: RunConfig, inputs: str, only: Stage | None = None) -> int:
    """Run what is not finished of a run's stages, or of one; return the code of the first that fails, else the worst verdict.

    `inputs` is a fingerprint of what the stages read. A stage whose settings, or those of a stage before it, have changed since
    it began does not resume from what it wrote, which is moved aside.
    """
    output = Path(run.output)
    record = Record(output, run.stages, run.minutes)
    worst, known = DONE, inputs
    for stage in run.stages[1:]:
        known = fingerprint(known, stage, decided_by(run, stage))
        if only not in (None, stage):
            continue
        title, before = f"{stage}: {TITLES[stage]}", record.steps.get(stage)
        if before is not None and before["job"] == known and before["done"]:
            print(f"\n== {title}: already finished", flush=True)
            worst = max(worst, before.get("code", DONE), key=SEVERITY.index)
            continue
        print(f"\n== {title}", flush=True)
        if before is not None and before["job"] != known and (output / stage).exists():
            _move_aside(output / stage)
        with record.step(stage, known) as entry:
            code = entry["code"] = run_stage(run, stage)
            is_verdict = stage in ("gate", "check") and code in SEVERITY
            entry["done"] = code == DONE or is_verdict
        print(f"   {entry['seconds']:.1f} s", flush=True)
        if not entry["done"]:
            print(f"\n== stopped: {stage} ended with {code}")
            return code
        worst = max(worst, code, key=SEVERITY.index)
    return worst


def _move_aside(folder: Path) -> None:
    """Give a folder the next free name of `folder.before-1`, `folder.before-2`, ..."""
    free = (folder.with_name(f"{folder.name}.before-{number}") for number in itertools.count(1))
    aside = next(path for path in free if not path.exists())
    folder.rename(aside)
    print(f"   settings changed: old {folder} moved to {aside}", flush=True)


def run_stage(run: RunConfig, stage: Stage) -> int:
    """Run a stage, and what belongs to it; return the exit code of its command."""
    output = Path(run.output)
    if stage == "mix":
        evaluation = stage_config(run, "eval")
        assert isinstance(evaluation, EvalConfig)
        mix(run, evaluation.suites, output / "data", output / "mix")
        return DONE
    arguments = stage_command(run, stage)
    print(f"   {shlex.join(['python', *arguments])}", flush=True)
    if stage in ("export", "check"):  # of a run that was cut off
        shutil.rmtree(output / stage, ignore_errors=True)
    code = run_step(arguments)
    if stage == "export" and run.engine == "vllm" and code == DONE:  # no other engine takes a lookup of ours
        code = run_step(_export(run, output / "data" / "train.jsonl", "suffix_lookup"))
    if stage == "gate" and run.refresh is not None:
        reports = [str(output / name / "report.json") for name in ("baseline", "eval")]
        run_step(["eval/compare.py", *reports, "--set", f"output={output / 'comparison.md'}"])
    if stage == "gate" and code in SEVERITY:
        return max(code, recommend(run)[1], key=SEVERITY.index)
    return code


def decided_by(run: RunConfig, stage: Stage) -> Any:
    """Return what decides a stage's results, besides the stages before it: where the output lies does not."""
    if stage == "check":
        return [stage, run.engine, is_checked_here(run.engine)]
    if stage == "mix" and run.refresh is not None:
        return [stage, run.refresh.replay, run.refresh.replay_share, (run.eval or {}).get("suites")]
    config = stage_config(run.model_copy(update={"output": "."}), stage)
    return [stage, run.engine if config is None else json.loads(config.model_dump_json())]


def is_checked_here(engine: Engine | None) -> bool:
    """Return whether the engine is installed, so that its check of the export takes time."""
    return engine == "transformers" or (engine == "vllm" and find_vllm(None) is not None)

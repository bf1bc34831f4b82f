"""The commands of a refresh, each with a config of its own in OUTPUT/configs, to be read and to be run by hand."""

from __future__ import annotations

from pathlib import Path

from configs.runtime.command import DONE
from configs.runtime.errors import InputError
from configs.runtime.files import write_json
from configs.runtime.loading import as_overrides, load_config
from configs.schema.commands.refreshing import OLD, TRAFFIC, RefreshConfig
from configs.schema.data import DataConfig, PromptsConfig
from configs.schema.evaluation import EvalConfig, SuiteConfig
from configs.schema.training import DistillConfig, HeadsConfig
from heads.metadata import Metadata
from scripts.run import steps
from scripts.run.stages import ENTRIES, target_folder

Config = DataConfig | DistillConfig | HeadsConfig | EvalConfig
FROM_ARTIFACT = {"init": "model", "layers": None, "overrides": None}


def call(entry: str, *arguments: str, launcher: str | None = None) -> int:
    """Run a command in a process of its own, from this folder; return its exit code."""
    launch = [] if launcher is None else [*steps.LAUNCH, launcher]
    return steps.run_step([*launch, entry, *arguments])


def call_with(config: Config, name: str, output: Path, launcher: str | None = None) -> int:
    """Write a command's config as `output/configs/name.json` and run the command that it is for."""
    path = output / "configs" / f"{name}.json"
    write_json(path, config.model_dump(mode="json"))
    return call(ENTRIES[type(config)], "--config", str(path), launcher=launcher)


def data_config(config: RefreshConfig, prompts: Path, output: Path) -> DataConfig:
    """Return the config that lets the target answer the traffic's prompts."""
    asked = PromptsConfig(
        source="file", path=str(prompts), num_prompts=config.log.num_conversations, on_too_long="skip", category=TRAFFIC
    )
    return DataConfig(
        target=config.target,
        prompts=asked,
        answers=config.answers,
        server=config.server,
        held_out_share=config.held_out_share,
        seed=config.seed,
        output=str(output),
    )


def training_recipe(config: RefreshConfig, served: Path, metadata: Metadata, folder: Path) -> DistillConfig | HeadsConfig:
    """Return the recipe that the served draft is trained on by; the artifact's own is written to be read with its defaults."""
    path = config.recipe
    if path is None:
        if not metadata.training:
            raise InputError(f"served: {served} does not say how it was trained; name a recipe of train/heads.py with recipe")
        path = str(folder / "configs" / "recipe.json")
        write_json(Path(path), metadata.training)
    changes = as_overrides(config.training)
    if metadata.kind == "draft_lm":
        return load_config(DistillConfig, path, changes)
    return load_config(HeadsConfig, path, changes)


def training_config(
    config: RefreshConfig, recipe: DistillConfig | HeadsConfig, served: Path, data: Path, output: Path
) -> DistillConfig | HeadsConfig:
    """Return the recipe with the target, the mixed data and the served draft to start from."""
    values = recipe.model_dump(mode="json")
    files = {name: str(data / f"{name}.jsonl") for name in ("train", "held_out")}
    values |= {"target": config.target.model_dump(mode="json"), "output": str(output)}
    values["data"] |= {**files, "cache": None}
    if isinstance(recipe, HeadsConfig):
        values["init"] = str(served)
    else:
        values["student"] |= {**FROM_ARTIFACT, "path": str(served)}
    return type(recipe).model_validate(values)


def eval_config(config: RefreshConfig, draft: Path, suite: Path, output: Path) -> EvalConfig:
    """Return the config that measures a draft on the traffic's held-out prompts and on the old suite."""
    traffic = SuiteConfig(name=TRAFFIC, path=str(suite), on_too_long="skip")
    plain = plain_eval(config, draft, [traffic, config.old_suite.model_copy(update={"name": OLD})], output)
    return plain.model_copy(update={"baselines": config.gate.must_beat})


def plain_eval(config: RefreshConfig, draft: Path, suites: list[SuiteConfig], output: Path) -> EvalConfig:
    """Return the config that measures a draft alone, without what else could be tried."""
    return EvalConfig(
        target=config.target,
        draft=str(draft),
        suite=suites[0],
        suites=suites[1:],
        decode=config.decode,
        repeats=config.repeats,
        baselines=[],
        try_with_lookup=False,
        lossless=config.lossless,
        bootstrap_samples=config.bootstrap_samples,
        output=str(output),
        overwrite=True,
    )


def judge(config: RefreshConfig, artifact: Path, report: Path, baseline: Path, output: Path) -> int:
    """Let the gate judge the new draft's report against the served one's; return its exit code."""
    path = output / "configs" / "gate.json"
    write_json(path, config.gate.model_dump(mode="json"))
    return call("eval/gate.py", str(report), "--baseline", str(baseline), "--artifact", str(artifact), "--config", str(path))


def export(config: RefreshConfig, artifact: Path, folder: Path) -> int:
    """Export the new draft for each engine named; return the first code that is not 0."""
    target = target_folder(config.target)
    for engine in config.exports:
        code = call("-m", "scripts.export", str(artifact), "--to", engine, "--out", str(folder / engine), *target)
        if code != DONE:
            return code
    return DONE

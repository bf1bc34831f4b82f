"""A refresh from the log to the verdict: its steps in order, and the checks before the first of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from configs.runtime.command import DONE, GATE_FAILED, INCONCLUSIVE
from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import find_shipped
from configs.schema.commands.refreshing import RefreshConfig
from heads.frozen.identity import hash_weights, locate
from heads.metadata import Metadata, hash_artifact, locate_artifact, read_metadata
from scripts.refresh_steps import commands
from scripts.refresh_steps.drift import measure_drift
from scripts.refresh_steps.mixing import mix
from scripts.refresh_steps.results import PAGE, RESULTS, write_refresh
from scripts.refresh_steps.steps import Step, end, run_steps
from scripts.refresh_steps.traffic import MANIFEST, PROMPTS, write_traffic

EXPORTS = "export"


def drift(config: RefreshConfig) -> int:
    """Measure the served draft by week of the log; return the exit code."""
    served, _ = find_served(config)
    return measure_drift(config, served)


def refresh(config: RefreshConfig) -> int:
    """Run what is not finished of a refresh; return the gate's exit code, or that of the step that failed.

    Raises:
        InputError: a file or folder of the config cannot be used.
    """
    output = Path(config.output)
    served, metadata = find_served(config)
    recipe = commands.training_recipe(config, served, metadata, output)
    replay = find_replay(config, recipe.data.train)
    traffic, data, mixed, trained = (output / name for name in ("traffic", "data", "training_data", "train"))
    measured, measured_served = output / "eval_refreshed", output / "eval_served"
    artifact = trained / "artifact"

    make_data = commands.data_config(config, traffic / PROMPTS, data)
    train = commands.training_config(config, recipe, served, mixed, trained)
    evaluate_served = commands.eval_config(config, served, mixed / "suite.jsonl", measured_served)
    evaluate = commands.eval_config(config, artifact, mixed / "suite.jsonl", measured)

    def clean() -> int:
        write_traffic(config, traffic)
        return DONE

    def mix_data() -> int:
        mix(config, served, data, replay, mixed)
        return DONE

    steps = [
        Step(
            name="clean the log",
            folder=traffic,
            decided_by=[config.log.model_dump(), hash_artifact(served, metadata)],
            run=clean,
        ),
        _command("let the target answer", make_data, "data", output),
        Step(
            name="mix with the old data",
            folder=mixed,
            decided_by=[str(replay), config.old_suite.model_dump(), config.replay_share, config.max_suite_prompts, config.seed],
            run=mix_data,
        ),
        _command("measure the served draft", evaluate_served, "eval_served", output),
        _command("train on", train, "train", output, launcher=config.accelerate),
        _command("measure the new draft", evaluate, "eval_refreshed", output),
    ]
    _remove_verdict(output)
    inputs = [Path(config.log.path), find_shipped(config.old_suite.path), *([] if replay is None else [replay])]
    code = run_steps(output, steps, inputs)
    if code != DONE:
        return code
    new, old = measured / "report.json", measured_served / "report.json"
    verdict = commands.judge(config, artifact, new, old, output)
    if verdict not in (DONE, GATE_FAILED, INCONCLUSIVE):
        return verdict
    write_refresh(output, new, old, traffic / MANIFEST, mixed / MANIFEST, verdict)
    if verdict == DONE and (code := commands.export(config, artifact, output / EXPORTS)) != DONE:
        return code
    end(output)
    return verdict


def _remove_verdict(output: Path) -> None:
    """Remove what an earlier run said and exported: a run that is cut off must not leave it to be taken for its own."""
    for name in (RESULTS, PAGE):
        (output / name).unlink(missing_ok=True)
    shutil.rmtree(output / EXPORTS, ignore_errors=True)


def find_served(config: RefreshConfig) -> tuple[Path, Metadata]:
    """Return the folder of the served artifact and what it says of itself.

    Raises:
        InputError: it is none, lies where the output goes, or was made for a target of other weights.
    """
    served = locate_artifact(config.served)
    metadata = read_metadata(served)
    _check_outside(config, "served", served)
    made_for = metadata.target.get("weights_sha256")
    if config.target.guidance is None and made_for != hash_weights(locate(config.target)):
        raise InputError(
            f"served: {served} was made for {metadata.target.get('name')}, and target.name {config.target.name} has other "
            "weights: name the target that it serves, or train a new draft for this one"
        )
    return served, metadata


def find_replay(config: RefreshConfig, recipe_data: str) -> Path | None:
    """Return the conversations to be replayed; None where the config wants none.

    Raises:
        InputError: they are not there, or lie where the output goes.
    """
    if config.replay_share == 0:
        return None
    replay = Path(config.replay or recipe_data)
    if not replay.is_file():
        raise InputError(f"replay: {replay} is not there; name the train.jsonl of the served draft, or set replay_share to 0")
    _check_outside(config, "replay", replay)
    return replay


def _command(name: str, config: commands.Config, file: str, output: Path, launcher: str | None = None) -> Step:
    """Return the step that runs a command, whose folder is the config's output, with `output/configs/FILE.json`."""
    return Step(
        name=name,
        folder=Path(config.output),
        decided_by=config.model_dump(mode="json"),
        run=lambda: commands.call_with(config, file, output, launcher),
    )


def _check_outside(config: RefreshConfig, key: str, path: Path) -> None:
    if path.resolve().is_relative_to(Path(config.output).resolve()):
        raise ConfigError(f"{key}: {path} lies in output, which a refresh replaces; copy it elsewhere and name the copy")

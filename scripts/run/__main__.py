"""From a model to a served draft: `draftsmith run MODEL --prompts FILE --budget 2h --for vllm`.

    draftsmith run ./my-model --prompts prompts.csv --budget 2h --for vllm
    draftsmith run runs/my-model/draft.yaml

Examines the model, runs every stage once in small, chooses what fits into the budget, prints the choice with its reasons and
writes it as OUTPUT/draft.yaml. Then the target answers the prompts, a draft is trained on the answers, evaluated, judged and
exported, each by its own command with a config in OUTPUT/configs. Rerun the same command, or name draft.yaml, to go on.
`draftsmith STAGE OUTPUT/draft.yaml` runs one stage. Ends with the gate's code. docs/walks.md has examples.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from configs.runtime.command import minutes, run_command
from configs.runtime.errors import InputError
from configs.runtime.files import folder_lock
from configs.runtime.loading import load_config
from configs.schema.base import dotted
from configs.schema.commands.release import ENGINES
from configs.schema.commands.running import DRAFT_FILE, STAGES, RunConfig


def main(asked: RunConfig, arguments: argparse.Namespace) -> int:
    """Run what is not finished of a run; return the exit code."""
    config = _requested(asked, arguments)
    # torch and transformers take seconds to import: a mistyped argument is reported before that.
    from scripts.run.flow import go_on, remove, run_stage, submit
    from scripts.run.steps import stop

    if arguments.on != "here":
        return submit(config, arguments.on)
    signal.signal(signal.SIGTERM, stop)
    with folder_lock(Path(config.output), beside=True):
        if arguments.fresh:
            remove(config)
        if arguments.stage is not None:
            return run_stage(config, arguments.stage)
        return go_on(config, ask=not arguments.yes and sys.stdin.isatty())


def _requested(asked: RunConfig, arguments: argparse.Namespace) -> RunConfig:
    """Return the run that the arguments ask for: one that was begun, or a new one."""
    model, given = arguments.model, [name for name in ("prompts", "budget", "engine", "output") if getattr(arguments, name)]
    for name in ("stage", "fresh"):
        if arguments.on != "here" and getattr(arguments, name):
            raise InputError(f"--{name}: a job goes on with the whole of a run, got --on {arguments.on}; give one of the two")
    if model is not None and model.endswith((".yaml", ".yml")):
        if arguments.fresh:
            raise InputError(f"--fresh: {model} would be removed with its run; name the model, as when the run was begun")
        if given:
            raise InputError(f"--{given[0].replace('engine', 'for')}: {model} says it already; change it there")
        return _in_its_folder(load_config(RunConfig, model, arguments.overrides), Path(model))
    if arguments.stage is not None:
        raise InputError(f"--stage: name the {DRAFT_FILE} of a run, got {model}")
    config = asked.model_copy(update=_from_arguments(asked, arguments))
    kept = Path(config.output) / DRAFT_FILE
    return _same_request(config, kept) if kept.is_file() and not arguments.fresh else config


def _in_its_folder(run: RunConfig, path: Path) -> RunConfig:
    """Return the run of a draft.yaml; an InputError where its output, relative to the caller's folder, is another folder."""
    folder, output = path.resolve().parent, Path(run.output)
    if output.resolve() == folder:
        return run
    depth = len(output.parts)
    here = not output.is_absolute() and folder.parts[-depth:] == output.parts
    instead = f"call from {Path(*folder.parts[:-depth])}, or " if here else ""
    raise InputError(
        f"{path}: output is {output}, from here {output.resolve()}, not this file's folder; {instead}set it to {folder}"
    )


def _from_arguments(asked: RunConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    from scripts.run.request import output_of, prompts_of

    name = asked.target.name if arguments.model is None else arguments.model
    name = str(Path(name).absolute()) if Path(name).exists() else name
    update: dict[str, Any] = {"target": asked.target.model_copy(update={"name": name})}
    update["prompts"] = prompts_of(arguments.prompts, asked.prompts)
    update["output"] = arguments.output or (asked.output if "output" in asked.model_fields_set else output_of(name))
    if arguments.budget is not None:
        update["budget_minutes"] = minutes(arguments.budget, "--budget")
    if arguments.engine is not None:
        update["engine"] = None if arguments.engine == "none" else arguments.engine
    return update


def _same_request(asked: RunConfig, path: Path) -> RunConfig:
    """Return a run that was begun before; an InputError where it was asked for otherwise."""
    kept = load_config(RunConfig, path)
    always = {  # left out, they ask for their defaults, and other settings for what the run has
        "target.name": asked.target.name,
        "budget_minutes": asked.budget_minutes,
        "engine": asked.engine,
        "prompts.path": asked.prompts.path,
    }
    given = always | _by_keys(asked, exclude_unset=True)
    begun = _by_keys(kept) | _by_keys(kept, exclude_unset=True)  # the latter for sections that are there, and empty
    for name, other in given.items():
        one = begun.get(name)
        is_fewer = name == "prompts.num_prompts" and kept.prompts.num_prompts < asked.prompts.num_prompts  # than the most
        if one != other and name != "output" and not is_fewer:
            raise InputError(
                f"{path} is of a run with the {name} {one}, and {other} is asked for: name another --output, or give --fresh "
                "to begin anew"
            )
    return kept.model_copy(update={"output": asked.output})  # as it is called from here


def _by_keys(run: RunConfig, *, exclude_unset: bool = False) -> dict[str, Any]:
    return dict(dotted(run.model_dump(mode="json", exclude_unset=exclude_unset), takes_all=True))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a Hub id, a folder, a .gguf file, or a run's draft.yaml; default: embedded")
    add("--prompts", metavar="FILE", help="what the model is asked: JSONL, CSV, Parquet, text, ...; default: it writes them")
    add("--budget", metavar="TIME", help="wall clock for all, such as 30m or 2h (default: 1h)")
    add("--for", dest="engine", choices=[*ENGINES, "none"], help="the engine that serves the draft (default: vllm)")
    add("--on", choices=("here", "slurm", "k8s"), default="here", help="where it runs")
    add("--output", metavar="DIR", help="the run's folder (default: runs/NAME)")
    add("--stage", choices=STAGES[1:], help="run this stage of a draft.yaml alone")
    add("--fresh", action="store_true", help="remove the run's folder first")
    add("--yes", action="store_true", help="do not ask before the first stage")


if __name__ == "__main__":
    description = "Train, judge and export a draft for a model, within a budget."
    sys.exit(run_command(RunConfig, main, description=description, add_arguments=add_arguments))

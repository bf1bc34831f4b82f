"""From a model to a served draft: `draftsmith run MODEL --prompts FILE --budget 2h --for vllm`.

Examines the model, runs every stage once in small, chooses what fits into the budget, prints the choice with its reasons and
writes it as OUTPUT/draft.yaml. Then the target answers the prompts, a draft is trained on the answers, evaluated, judged and
exported, each by its own command with a config in OUTPUT/configs. Run the same command, or `draftsmith run draft.yaml`, to
resume; `draftsmith STAGE OUTPUT/draft.yaml` runs one stage. Ends with the gate's code. docs/walks.md has examples.

`--from ARTIFACT --prompts LOG` trains a served draft on with its traffic and judges it against itself as it is served
(docs/releasing.md).
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
from configs.schema.base import dotted
from configs.schema.commands.release import ENGINES
from configs.schema.commands.running import DRAFT_FILE, STAGES, RefreshConfig, RunConfig, read_draft_file


def main(asked: RunConfig, arguments: argparse.Namespace) -> int:
    """Run what is not finished of a run; return the exit code."""
    run = _requested(asked, arguments)
    # torch and transformers take seconds to import: a mistyped argument is reported before that.
    from scripts.run.drift import measure_drift
    from scripts.run.flow import go_on, run_stage, submit
    from scripts.run.steps import stop

    if arguments.on != "here":
        return submit(run, arguments.on)
    signal.signal(signal.SIGTERM, stop)
    with folder_lock(Path(run.output), beside=True):
        if arguments.drift:
            return measure_drift(run)
        if arguments.stage is not None:
            return run_stage(run, arguments.stage)
        return go_on(run, ask=not arguments.yes and sys.stdin.isatty())


def _requested(asked: RunConfig, arguments: argparse.Namespace) -> RunConfig:
    """Return the run that the arguments ask for: one that was begun, or a new one."""
    model = arguments.model
    given = [name for name in ("from", "prompts", "budget", "for", "output") if getattr(arguments, name)]
    for name in ("stage", "drift"):
        if arguments.on != "here" and getattr(arguments, name):
            raise InputError(f"--{name}: a job runs the whole of a run, got --on {arguments.on}; give one of the two")
    if model is not None and model.endswith((".yaml", ".yml")):
        if given:
            raise InputError(f"--{given[0]}: {model} says it already; change it there")
        return read_draft_file(Path(model), arguments.overrides)
    if arguments.stage is not None:
        raise InputError(f"--stage: name the {DRAFT_FILE} of a run, got {model}")
    run = asked.model_copy(update=_from_arguments(asked, arguments))
    if arguments.drift and run.refresh is None:
        raise InputError("--drift: name the draft in service with --from")
    if run.refresh is not None and run.prompts.source != "file":
        raise InputError("--from: name the log of what the draft was asked, a file or a folder, with --prompts")
    kept = Path(run.output) / DRAFT_FILE
    return run if arguments.drift or not kept.is_file() else _same_request(run, kept)


def _from_arguments(asked: RunConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    from scripts.run.request import absolute, output_of, prompts_of

    given = vars(arguments)
    name = absolute(asked.target.name if arguments.model is None else arguments.model)
    update: dict[str, Any] = {"target": asked.target.model_copy(update={"name": name})}
    update["prompts"] = prompts_of(arguments.prompts, asked.prompts)
    update["output"] = arguments.output or (asked.output if "output" in asked.model_fields_set else output_of(name))
    if given["from"] is not None or asked.refresh is not None:
        refresh = asked.refresh or RefreshConfig(served=given["from"])
        served = absolute(given["from"] or refresh.served)
        replay = None if refresh.replay is None else absolute(refresh.replay)
        update["refresh"] = refresh.model_copy(update={"served": served, "replay": replay})
    if arguments.budget is not None:
        update["budget_minutes"] = minutes(arguments.budget, "--budget")
    if given["for"] is not None:
        update["engine"] = None if given["for"] == "none" else given["for"]
    return update


def _same_request(asked: RunConfig, path: Path) -> RunConfig:
    """Return a run that was begun before; an InputError where it was asked for otherwise."""
    kept = read_draft_file(path)
    always = {  # left out, they ask for their defaults, and other settings for what the run has
        "target.name": asked.target.name,
        "budget_minutes": asked.budget_minutes,
        "engine": asked.engine,
        "prompts.path": asked.prompts.path,
        "refresh.served": asked.refresh and asked.refresh.served,
    }
    given = always | _by_keys(asked, exclude_unset=True)
    begun = _by_keys(kept) | _by_keys(kept, exclude_unset=True)  # the latter for sections that are there, and empty
    for name, other in given.items():
        one = begun.get(name)
        is_fewer = name == "prompts.num_prompts" and kept.prompts.num_prompts < asked.prompts.num_prompts  # than the most
        if one != other and name != "output" and not is_fewer:
            raise InputError(
                f"{path} is of a run with the {name} {one}, and {other} is asked for: name another --output, or remove "
                "its folder"
            )
    return kept


def _by_keys(run: RunConfig, *, exclude_unset: bool = False) -> dict[str, Any]:
    return dict(dotted(run.model_dump(mode="json", exclude_unset=exclude_unset)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a Hub id, a folder, a .gguf file, or a run's draft.yaml; default: embedded")
    add("--prompts", metavar="FILE", help="what the model is asked: JSONL, CSV, Parquet, text, ...; default: it writes them")
    add("--budget", metavar="TIME", help="wall clock for all, such as 30m or 2h (default: 1h)")
    add("--for", choices=[*ENGINES, "none"], help="the engine that serves the draft (default: vllm)")
    add("--from", metavar="ARTIFACT", help="the draft in service, to train on with its log, which --prompts names")
    add("--drift", action="store_true", help="with --from: train nothing, measure tau by week of the log")
    add("--on", choices=("here", "slurm", "k8s"), default="here", help="where it runs")
    add("--output", metavar="DIR", help="the run's folder (default: runs/NAME)")
    add("--stage", choices=STAGES[1:], help="run this stage of a draft.yaml alone")
    add("--yes", action="store_true", help="do not ask before the first stage")


if __name__ == "__main__":
    description = "Train, judge and export a draft for a model, within a budget."
    sys.exit(run_command(RunConfig, main, description=description, add_arguments=add_arguments))

"""A run from the request to the export: examine, dry run, choose, and run the stages that are not finished."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

from configs.runtime.command import DONE, FAILED, INTERRUPTED
from configs.runtime.errors import InputError
from configs.runtime.files import find_shipped, new_folder, write_text
from configs.runtime.run_record import fingerprint, write_run_record
from configs.runtime.terminal import say
from configs.schema.commands.running import DRAFT_FILE, RunConfig, Stage, Where, read_draft_file
from eval.report.tables import table
from heads.frozen.identity import remembered_sha256, save_dequantised
from scripts.run.draft_file import apply, asked_first, write_draft_file
from scripts.run.dry_run import FOLDER, dry_run
from scripts.run.mix import prepare
from scripts.run.plan import choose
from scripts.run.recommendation import recommend
from scripts.run.request import examine
from scripts.run.stages import TITLES, is_checked_here, run_stages
from scripts.run.steps import SEVERITY, Record


def go_on(run: RunConfig, *, ask: bool) -> int:
    """Run what is not finished of a run; return the exit code."""
    if not run.is_chosen:
        run = choose_stages(run)
        if ask and input("\nStart? [y/N] ").strip().lower() not in ("y", "yes"):
            say(f"stopped before the first stage; resume: draftsmith run {Path(run.output) / DRAFT_FILE}")
            return INTERRUPTED
    write_run_record(Path(run.output), run)
    code = run_stages(run, inputs_of(run))
    if code in SEVERITY and (advice := recommend(run)[0]):
        say(f"\nmeasured here, one user at a time: {advice}")
    say(f"\ndraftsmith watch {run.output} shows it all\nexit code: {code}")
    return code


def run_stage(run: RunConfig, stage: Stage) -> int:
    """Run one stage of a run whose stages were chosen."""
    if not run.is_chosen:
        raise InputError(
            f"{Path(run.output) / DRAFT_FILE} has no choices yet: draftsmith run {Path(run.output) / DRAFT_FILE} makes them"
        )
    if stage not in run.stages:
        raise InputError(f"this run has no stage {stage}; it has {', '.join(run.stages[1:])}")
    return run_stages(run, inputs_of(run), only=stage)


def inputs_of(run: RunConfig) -> str:
    """Return a fingerprint of the files that a run reads, by contents; of a log, which grows, it keeps what it has read."""
    prompts = run.prompts.path if run.prompts.source == "file" else None
    named = [run.target.name, *((prompts,) if run.refresh is None else (run.refresh.served, run.refresh.replay))]
    paths = [Path(each) for each in named if each is not None and Path(each).exists()]
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    return fingerprint({str(file): remembered_sha256(file) for file in files})


def choose_stages(run: RunConfig) -> RunConfig:
    """Examine a run, try its stages in small, and write what was chosen for each into its draft.yaml."""
    asked, output = run, Path(run.output)
    unpack(run)
    begun = [] if run.refresh is None else asked_first(asked, prepare(run))
    run, facts, choices = examine(apply(asked, begun))
    choices = [*begun, *(each for each in choices if each.key not in {one.key for one in begun})]
    write_draft_file(asked)  # alone: what a dry run that is cut off had chosen is not what was asked for
    say(f"draftsmith run: a draft for {run.target.name} in {run.budget_minutes:g} minutes, in {output}\n")
    say("\n".join(map(str, choices)))
    say(f"\n== dry run: {TITLES['dry_run']}")
    with Record(output, run.stages, {}).step("dry_run", "") as entry:
        rates = dry_run(run, facts)
        entry.update(done=True, code=DONE)
    chosen = asked_first(asked, choose(run, facts, rates, checks=is_checked_here(run.engine)))
    run = apply(run, chosen)
    write_draft_file(run, [*choices, *chosen])
    shutil.rmtree(output / FOLDER)
    say("\n" + "\n".join(str(each) for each in chosen if each.key not in ("prompts", "minutes")))
    rows = [(stage, f"{run.minutes[stage]:.1f}", TITLES[stage]) for stage in run.stages if stage in run.minutes]
    say(table(("stage", "minutes", "what it does"), rows))
    say(f"written as {output / DRAFT_FILE}, which may be changed; draftsmith watch {output} shows how far it is")
    return run


def unpack(run: RunConfig) -> None:
    """Unpack a target of a .gguf file into a folder, as the form that engines and exports read."""
    if run.unpacked is None or Path(run.unpacked).exists():
        return
    folder, gguf = Path(run.unpacked), Path(run.target.name)
    if not gguf.is_file():
        raise InputError(f"{gguf} is not there")
    say(f"unpacking {gguf} into {folder}")
    with new_folder(folder) as made:
        save_dequantised(gguf, made)


def submit(run: RunConfig, where: Where) -> int:
    """Hand the run to a cluster as a job of one node, on which the same command runs it; without one, say what to type."""
    output = Path(run.output).absolute()
    path, run = output / DRAFT_FILE, run.model_copy(update={"output": str(output)})
    if not path.is_file() or read_draft_file(path) != run:  # else it has the reasons of what was chosen
        write_draft_file(run)
    template = find_shipped(f"scripts/cluster/run.{'sbatch' if where == 'slurm' else 'yaml'}")
    if where == "slurm":
        command = ["sbatch", str(template), str(path)]
    else:
        job, name = path.with_name("job.yaml"), output.name.lower().replace("_", "-").replace(".", "-")
        write_text(job, template.read_text(encoding="utf-8").replace("${NAME}", name).replace("${DRAFT}", str(path)))
        command = ["kubectl", "apply", "-f", str(job)]
    if shutil.which(command[0]) is None:
        say(f"{command[0]} not found; submit with:\n\n    {shlex.join(command)}")
        return DONE
    return DONE if subprocess.run(command, check=False).returncode == 0 else FAILED

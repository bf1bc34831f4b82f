"""A run from the request to the export: examine, rehearse, choose, and run the stages that are not finished."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from configs.runtime.command import DONE, INTERRUPTED
from configs.runtime.errors import InputError
from configs.runtime.files import new_folder
from configs.runtime.resumable import files_fingerprint
from configs.runtime.run_record import write_run_record
from configs.runtime.terminal import say
from configs.schema.commands.running import DRAFT_FILE, RunConfig, Stage, Where
from distill.generation.split import share_for
from eval.report.markdown import table
from heads.frozen.identity import save_dequantised
from scripts.run.draft_file import apply, asked_first, read_choices, write_draft_file
from scripts.run.dry_run import FOLDER, rehearse
from scripts.run.jobs import submit_job
from scripts.run.plan import choose
from scripts.run.request import Facts, examine
from scripts.run.stages import TITLES, is_checked_here, run_stages
from scripts.run.steps import Record
from scripts.watch.view import PAGE, page_kept

CPU_BATCH, GPU_BATCH = 48, 64  # prompts answered together
REHEARSED_ON_CPU, REHEARSED = 64, 512  # tokens of an answer in the rehearsal ...
LONGER_FROM_MINUTES = 60  # ... twice as many on a CPU where there is time for it
FEW = 8  # held-out prompts of a rehearsal


def go_on(run: RunConfig, *, ask: bool) -> int:
    """Run what is not finished of a run, whose page is written as it goes; return the exit code."""
    with page_kept(Path(run.output)):
        if not run.is_chosen:
            run = choose_stages(run)
            if ask and input("\ngo on? [y/N] ").strip().lower() not in ("y", "yes"):
                say(f"nothing more was run; draftsmith run {Path(run.output) / DRAFT_FILE} goes on")
                return INTERRUPTED
        write_run_record(Path(run.output), run)
        code = run_stages(run, inputs_of(run))
    say(f"\n{Path(run.output) / PAGE} shows it all\nexit code: {code}")
    return code


def run_stage(run: RunConfig, stage: Stage) -> int:
    """Run one stage of a run whose stages were chosen."""
    if not run.is_chosen:
        raise InputError(
            f"{Path(run.output) / DRAFT_FILE} has no choices yet: draftsmith run {Path(run.output) / DRAFT_FILE} makes them"
        )
    if stage not in run.stages:
        raise InputError(f"this run has no stage {stage}; it has {', '.join(run.stages[1:])}")
    with page_kept(Path(run.output)):
        return run_stages(run, inputs_of(run), only=stage)


def inputs_of(run: RunConfig) -> str:
    """Return a fingerprint of the files that a run reads."""
    return files_fingerprint(_files_of(run))


def _files_of(run: RunConfig) -> list[Path]:
    """Return the target and the prompts of a run, where they are files or folders."""
    named = [run.target.name, run.prompts.path if run.prompts.source == "file" else None]
    return [Path(each) for each in named if each is not None and Path(each).exists()]


def remove(run: RunConfig) -> None:
    """Remove the folder of a run that is to begin anew; an InputError where it holds something else."""
    folder = Path(run.output)
    if not folder.exists():
        return
    if not (folder / DRAFT_FILE).is_file() and (folder.is_file() or any(folder.iterdir())):
        raise InputError(
            f"--fresh: {folder} holds no run, for want of a {DRAFT_FILE}; remove it yourself, or name another --output"
        )
    for path in _files_of(run):
        if path.resolve().is_relative_to(folder.resolve()):
            raise InputError(f"--fresh: {path} would be removed with {folder}; move it, or name another --output")
    shutil.rmtree(folder)


def choose_stages(run: RunConfig) -> RunConfig:
    """Examine and rehearse a run, and write what was chosen for each stage into its draft.yaml."""
    asked, output = run, Path(run.output)
    unpack(run)
    run, facts, choices = examine(asked)
    write_draft_file(asked)  # alone: what a rehearsal that is cut off had chosen is not what was asked for
    say(f"draftsmith run: a draft for {run.target.name} in {run.budget_minutes:g} minutes, in {output}\n")
    say("\n".join(map(str, choices)))
    say("\n== rehearsal: every stage once in small, to measure this machine")
    batch = CPU_BATCH if facts.on_cpu else GPU_BATCH
    rehearsed = REHEARSED_ON_CPU * (1 + (run.budget_minutes >= LONGER_FROM_MINUTES)) if facts.on_cpu else REHEARSED
    number = min(2 * batch, facts.num_prompts or 2 * batch)
    share = share_for(facts.prompts[:number], FEW) if facts.prompts else FEW / number
    with Record(output, run.stages, {}).step("rehearsal", "") as entry:
        rates = rehearse(
            run.model_copy(
                update={
                    "cache": {**cache_of(facts), **(run.cache or {})},
                    "eval": {**facts.cost(run), **(run.eval or {})},
                    "train": {**(run.train or {}), **facts.rehearsed},
                }
            ),
            num_prompts=number,
            max_new_tokens=min(rehearsed, facts.context // 2),
            batch_size=batch,
            held_out_share=share,
        )
        entry.update(done=True, code=DONE)
    chosen = asked_first(asked, choose(run, facts, rates, checks=is_checked_here(run.engine), data_batch=batch))
    run = apply(run, chosen)
    write_draft_file(run, [*choices, *chosen])
    shutil.rmtree(output / FOLDER)
    say("\n" + "\n".join(str(each) for each in chosen if each.key not in ("prompts", "minutes")))
    rows = [(stage, f"{run.minutes[stage]:.1f}", TITLES[stage]) for stage in run.stages if stage in run.minutes]
    say(table(("stage", "minutes", "what it does"), rows))
    say(f"written as {output / DRAFT_FILE}, which may be changed; draftsmith watch {output} shows how far it is")
    return run


def cache_of(facts: Facts) -> dict[str, Any]:
    """Return what a cache of the target's states holds for the recipe."""
    return {"taps": sorted(facts.plan.models.taps or ()), "max_length": facts.plan.config.data.max_length}


def unpack(run: RunConfig) -> None:
    """Unpack a target of a .gguf file into a folder, as the form that engines and exports read."""
    if run.unpacked is None or Path(run.unpacked).exists():
        return
    folder = Path(run.unpacked)
    gguf = Path(run.target.name)
    if not gguf.is_file():
        raise InputError(f"{gguf} is not there")
    say(f"unpacking {gguf} into {folder}")
    with new_folder(folder) as made:
        save_dequantised(gguf, made)


def submit(run: RunConfig, where: Where) -> int:
    """Write the run with an output that any folder finds, and hand it to a cluster as a job that runs it there."""
    output = Path(run.output).absolute()
    reasons = list(read_choices(output / DRAFT_FILE))
    return submit_job(write_draft_file(run.model_copy(update={"output": str(output)}), reasons), where)

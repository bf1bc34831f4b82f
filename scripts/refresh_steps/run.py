"""A refresh from the log to the verdict: its steps in order, and the checks before the first of them."""

from __future__ import annotations

import logging
import shutil
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from configs.runtime.command import BAD_INPUT, DONE, GATE_FAILED
from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import find_shipped, new_folder, read_object, write_json, write_text
from configs.runtime.resumable import files_fingerprint
from configs.runtime.terminal import say
from configs.schema.commands.refreshing import OLD, TRAFFIC, RefreshConfig
from configs.schema.evaluation import SuiteConfig
from distill.dataset.conversations import text_hash
from eval.report.comparison import tau_change
from eval.report.markdown import table
from eval.report.schema import load_report
from eval.report.text import interval, number
from heads.frozen.identity import hash_weights, locate
from heads.metadata import Metadata, hash_artifact, locate_artifact, read_metadata
from scripts.refresh_steps import commands
from scripts.refresh_steps.mixing import known_prompts, mix
from scripts.refresh_steps.traffic import MANIFEST, PROMPTS, ServedPrompt, Traffic, newest, read_traffic, write_traffic
from scripts.run.steps import SEVERITY, Step, run_steps

log = logging.getLogger("draftsmith")
RESULTS, PAGE, EXPORTS = "refresh.json", "refresh.md", "export"
VERDICTS = {DONE: "pass", GATE_FAILED: "fail"}
LABELS = {TRAFFIC: "held-out traffic", OLD: "old suite (forgetting)"}
INPUTS = "inputs.json"  # while a run is not ended: the log and data as it read them


def drift(config: RefreshConfig) -> int:
    """Measure the served draft by week of the log, a suite of one report each; return the exit code."""
    served, _ = find_served(config)
    folder = Path(config.output) / "drift"
    write_weeks(config, served, read_traffic(config), folder / "weeks")
    weeks = sorted((folder / "weeks").glob("*.jsonl"))
    suites = [SuiteConfig(name=path.stem, path=str(path), on_too_long="skip") for path in weeks]
    evaluation = commands.plain_eval(config, served, suites, folder / "eval")
    return commands.call_with(evaluation, "drift", Path(config.output))


def refresh(config: RefreshConfig) -> int:
    """Run what is not finished of a refresh; return the gate's exit code, or that of the step that failed.

    A run that was cut off keeps what it has read of the log; one after a verdict, or after bad input, reads it again.
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

    steps = [
        Step(
            name="clean the log",
            folder=traffic,
            decided_by=[config.log.model_dump(), hash_artifact(served, metadata)],
            run=lambda: write_traffic(config, traffic),
        ),
        _command("let the target answer", make_data, "data", output),
        Step(
            name="mix with the old data",
            folder=mixed,
            decided_by=[str(replay), config.old_suite.model_dump(), config.replay_share, config.max_suite_prompts, config.seed],
            run=lambda: mix(config, served, data, replay, mixed),
        ),
        _command("measure the served draft", evaluate_served, "eval_served", output),
        _command("train on", train, "train", output, launcher=config.accelerate),
        _command("measure the new draft", evaluate, "eval_refreshed", output),
    ]
    for name in (RESULTS, PAGE):  # of an earlier run: one that is cut off must not leave them to be taken for its own
        (output / name).unlink(missing_ok=True)
    shutil.rmtree(output / EXPORTS, ignore_errors=True)
    inputs = [Path(config.log.path), find_shipped(config.old_suite.path), *([] if replay is None else [replay])]
    try:
        code = run_steps(output, steps, _read_inputs(output / INPUTS, inputs), keep_others=False)
    except InputError:
        (output / INPUTS).unlink()
        raise
    if code == BAD_INPUT:
        (output / INPUTS).unlink()
    if code != DONE:
        return code
    new, old = measured / "report.json", measured_served / "report.json"
    verdict = commands.judge(config, artifact, new, old, output)
    if verdict not in SEVERITY:
        return verdict
    _write_results(output, new, old, traffic / MANIFEST, mixed / MANIFEST, verdict)
    if verdict == DONE and (code := commands.export(config, artifact, output / EXPORTS)) != DONE:
        return code
    (output / INPUTS).unlink()
    return verdict


def _read_inputs(path: Path, inputs: list[Path]) -> str:
    """Return a fingerprint of what a run reads: as it was when a run that is not ended read it, else as it is now."""
    if not path.is_file():
        write_json(path, {"fingerprint": files_fingerprint(inputs)})
    return str(read_object(path, "record of what was read")["fingerprint"])


def _write_results(output: Path, new: Path, served: Path, traffic: Path, mixed: Path, code: int) -> None:
    """Write `refresh.json` and `refresh.md`: tau of both drafts on both suites, compared prompt by prompt."""
    ours, theirs = load_report(new), load_report(served)
    changes: dict[str, dict[str, Any]] = {}
    for name, suite in ((TRAFFIC, None), (OLD, OLD)):
        change = tau_change(ours, theirs, suite)
        changes[name] = {"num_prompts": 0} if change is None else {"num_prompts": change.num_clusters, **asdict(change)}
    verdict = VERDICTS.get(code, "inconclusive")
    trained_on = read_object(mixed, "manifest")["counts"]["train"]["by_source"]
    write_json(
        output / RESULTS,
        {
            "format_version": 1,
            "verdict": verdict,
            "exit_code": code,
            "tokens_per_target_step": changes,
            "traffic": read_object(traffic, "manifest"),
            "trained_on": trained_on,
        },
    )
    rows = []
    for name, label in LABELS.items():
        each = changes[name]
        ratio = f"{number(each.get('ratio'), 3)} {interval(each.get('ratio_ci'), 3)}"
        rows.append((label, str(each["num_prompts"]), number(each.get("theirs")), number(each.get("ours")), ratio))
    page = (
        f"# Refresh: {verdict}\n\nTokens per target step, both drafts on the same prompts. Trained on {trained_on['traffic']} "
        f"conversations of the traffic and {trained_on['replay']} of the old data.\n\n"
        + table(("prompts", "number", "served", "refreshed", "ratio [95 % interval]"), rows)
        + "\n"
    )
    write_text(output / PAGE, page)
    say(page)


def find_served(config: RefreshConfig) -> tuple[Path, Metadata]:
    """Return the folder of the served artifact and what it says of itself."""
    served = locate_artifact(config.served)
    metadata = read_metadata(served)
    _check_outside(config, "served", served)
    made_for = metadata.target.get("weights_sha256")
    if made_for != hash_weights(locate(config.target)):
        raise InputError(
            f"served: {served} was made for {metadata.target.get('name')}, and target.name {config.target.name} has other "
            "weights: name the target that it serves, or train a new draft for this one"
        )
    return served, metadata


def find_replay(config: RefreshConfig, recipe_data: str) -> Path | None:
    """Return the conversations to be replayed; None where the config wants none."""
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


def write_weeks(config: RefreshConfig, served: Path, traffic: Traffic, folder: Path) -> None:
    """Write a suite for each of the newest weeks with enough prompts."""
    if missing := traffic.without_time:
        words = f"{len(missing)} of {len(traffic.rows)} rows do not say when they were served"
        message = f"log.time_field: {words}, {missing[0]} for one"
        if len(missing) == len(traffic.rows):
            raise InputError(f"{message}; drift is counted by week: name the key that has the time, in seconds or ISO 8601")
        log.warning("%s; they are in no week", message)
    suites, too_few = _weeks(config, served, traffic)
    found = ", ".join(f"{week} {count}" for week, count in too_few.items())
    if not suites:
        raise InputError(
            f"drift.min_prompts: no week of the log has {config.drift.min_prompts} prompts that the draft was not trained on "
            f"({found}); ask for fewer"
        )
    if too_few:
        log.warning("not measured, for fewer than %d prompts: %s", config.drift.min_prompts, found)
    with new_folder(folder) as scratch:
        for week, rows in suites.items():
            write_text(scratch / f"{week}.jsonl", "".join(row.to_line() for row in rows))


def _weeks(config: RefreshConfig, served: Path, traffic: Traffic) -> tuple[dict[str, list[ServedPrompt]], dict[str, int]]:
    """Return the prompts to measure by week, and how many the weeks have that have too few."""
    known = known_prompts(served)
    by_week: dict[str, list[ServedPrompt]] = defaultdict(list)
    for row in traffic.rows:
        if row.time is not None:
            by_week["{}-W{:02d}".format(*row.time.isocalendar())].append(row)
    suites: dict[str, list[ServedPrompt]] = {}
    too_few: dict[str, int] = {}
    for week in sorted(by_week)[-config.drift.num_weeks :]:
        # The first turns, because conversations that begin alike are one prompt then.
        firsts = [replace(row, prompt=replace(row.prompt, turns=row.prompt.turns[:1])) for row in by_week[week]]
        rows = newest(traffic, firsts, config.log, len(firsts))
        unknown = [row for row in rows if known.isdisjoint(map(text_hash, row.prompt.user_texts))]
        if len(unknown) < config.drift.min_prompts:
            too_few[week] = len(unknown)
            continue
        step = max(1.0, len(unknown) / config.drift.prompts_per_week)
        suites[week] = [unknown[int(place * step)] for place in range(min(len(unknown), config.drift.prompts_per_week))]
    return suites, too_few

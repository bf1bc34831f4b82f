"""One evaluation: decode every prompt plainly, with the draft and with the free baselines; check losslessness; report.

Several processes share the decoding (`eval.measure.shards`); the main one does the rest.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from configs.runtime.command import DONE
from configs.runtime.errors import InputError
from configs.runtime.files import read_json, write_text
from configs.runtime.redaction import mask_arguments, mask_secrets
from configs.runtime.resumable import fingerprint
from configs.runtime.run_record import describe_git, describe_hardware, describe_versions, write_run_record
from configs.runtime.terminal import say
from configs.schema.evaluation import EvalConfig, SuiteConfig
from eval.cost.predict import predict_speed
from eval.cost.timing_sweep import check_sweep
from eval.cost.tree_choice import find_tree
from eval.decoder.decode import check_decodable
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, WITH_LOOKUP, Laps
from eval.lossless.verdict import INCONCLUSIVE, judge_lossless
from eval.measure.generate import time_generate
from eval.measure.proposers import EvaluatedDraft, add_lookup, find_lookup_length, load_evaluated, make_baselines
from eval.measure.record_files import drop_batches
from eval.measure.shards import measure_share
from eval.measure.suite import Suite, fit_suite, load_suites, trained_on
from eval.measure.turns import Turns
from eval.metrics.energy import find_meter, summarise_energy
from eval.metrics.quality import Quality
from eval.metrics.tally import Tally
from eval.report.build import PromptSet, build_report, complete_report
from eval.report.markdown import render_markdown
from eval.report.page import render_html
from eval.report.schema import Report, write_report
from heads.frozen.loading import Target, load_target
from heads.frozen.processes import join_processes
from heads.proposers.protocol import Proposer

log = logging.getLogger("draftsmith")
# What comes after the measurement, or says where it goes: a run that is resumed may change these.
AFTERWARDS = {
    "lossless",
    "cost",
    "quality",
    "render",
    "num_rendered",
    "bootstrap_samples",
    "output",
    "overwrite",
}
UNCHECKED = {"verdict": INCONCLUSIVE, "checked_prompts": 0, "divergences": [], "checks": {}, "failed_checks": []}
SUBJECT = ("target.name", "target.revision", "draft", "suite.path", "suite.subset", "suite.split")  # what a report is of


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What an evaluation decodes, and with what."""

    suites: list[Suite]
    turns: Turns  # of the prompts of all suites
    target: Target
    draft: EvaluatedDraft
    state: PartialState  # of the processes

    def fingerprint(self, config: EvalConfig) -> str:
        """Return the fingerprint of all that decides the records, and of the machine on which they are timed."""
        made_of = [*(suite.sha256 for suite in self.suites), self.target.identity.to_dict(), self.draft.section["sha256"]]
        machine = [describe_hardware(), describe_versions(), self.state.num_processes, torch.get_num_threads()]
        return fingerprint(config.model_dump(mode="json", exclude=AFTERWARDS), made_of, machine)


def evaluate(config: EvalConfig, laps: Laps | None = None) -> int:
    """Evaluate as configured and write `report.json`, `.html`, `.md`, `records.jsonl` and `run.json`; see `eval/run.py`.

    Args:
        config: what to decode, and how.
        laps: records how long each part took; started by the caller.

    Returns:
        The exit code.
    """
    laps = Laps() if laps is None else laps
    output = Path(config.output)
    _check_output(output, config)
    suites = load_suites(config.all_suites)
    quality = Quality(config, suites[0].prompts)
    loaded = _load(config, suites)
    target, state = loaded.target, loaded.state
    job = loaded.fingerprint(config)
    decode, how_chosen = find_tree(config, loaded.suites[0], target, loaded.draft, state, job)
    config = config.model_copy(update={"decode": decode})
    laps.done("loading")
    config = find_lookup_length(config, loaded.turns.first, target, state, job)
    laps.done("choosing the lookup's length")
    meters = find_meter(target.device, state.num_processes) if config.energy else None
    meter, job = None if meters is None else meters.meter, loaded.fingerprint(config)
    tallies = measure_share(target, loaded.turns, config, _proposers(config, loaded), state, meter, job=job)
    if tallies is None:
        return DONE
    records = tallies[suites[0].name]
    if not state.is_main_process:  # the checks run the target, and load it anew, which all of its groups must do
        _check_lossless(config, loaded, tallies)
        quality.judge(target, records)
        state.wait_for_everyone()
        return DONE
    laps.done("decoding")
    report = _build_report(config, loaded, tallies, how_chosen)
    # What follows may fail, out of memory or in a scorer; the measurements must not be lost with it.
    partial = output / "report.partial.json"
    write_report(partial, report)
    laps.done("report")
    report = complete_report(report, lossless=_check_lossless(config, loaded, tallies))
    write_report(partial, report)
    laps.done("losslessness")
    scores = quality.judge(target, records)
    if target.group is not None:
        state.wait_for_everyone()  # the first process is the one that the others meet at
    rendered = quality.rendered(target, records)
    energy = None if meters is None else summarise_energy(records.timings, meters, config)
    laps.done("report")
    speed = _time_others(config, loaded, records, report)
    laps.done("timing sweep")
    report = complete_report(report, quality=scores, energy=energy, speed=speed, rendered=rendered)
    _write(output, report)
    partial.unlink()
    drop_batches(output)
    laps.done("report")
    log.info("took: %s", laps)
    log.info("report in %s", output / "report.html")
    return DONE


def _load(config: EvalConfig, suites: Sequence[Suite]) -> Loaded:
    """Load target and draft, fit the prompts to the target's context, and write what is run, once for all processes."""
    state = join_processes(config.target)
    target = load_target(config.target, for_chats=True)
    draft = load_evaluated(config, target)
    for warning in draft.warnings:
        log.warning("%s", warning)
    fitted = [
        fit_suite(suite, target, each.on_too_long, config.decode.max_new_tokens)
        for suite, each in zip(suites, config.all_suites, strict=True)
    ]
    suite_of = {prompt.prompt_id: suite.name for suite in fitted for prompt in suite.prompts}
    turns = Turns(target, [prompt for suite in fitted for prompt in suite.prompts], suite_of)
    check_decodable(target, turns.first, config.decode)
    if config.cost is not None:
        check_sweep(target, config.cost)
    if state.is_main_process:
        write_run_record(Path(config.output), config, processes=state.num_processes)
    state.wait_for_everyone()  # the folder is there
    return Loaded(suites=fitted, turns=turns, target=target, draft=draft, state=state)


def _proposers(config: EvalConfig, loaded: Loaded) -> dict[str, Proposer]:
    """Return who drafts in each mode but plain decoding."""
    proposers = {SPECULATIVE: loaded.draft.proposer, **make_baselines(config, loaded.target)}
    if config.tries_lookup:
        proposers[WITH_LOOKUP] = add_lookup(loaded.draft.proposer, config, loaded.target)
    return proposers


def _write(output: Path, report: Report) -> None:
    """Write the report and its pages, and print the summary."""
    write_report(output / "report.json", report)
    summary = render_markdown(report)
    write_text(output / "report.md", summary)
    write_text(output / "report.html", render_html(report))
    say(summary)


def _check_output(output: Path, config: EvalConfig) -> None:
    """Refuse to write over the report of another target, draft or suite, by the record beside it.

    Raises:
        InputError: names what is another.
    """
    record = output / "run.json"
    if config.overwrite or not (output / "report.json").is_file() or not record.is_file():
        return
    there, here = read_json(record, "record of the run")["config"], mask_secrets(config.model_dump(mode="json"))
    for key in SUBJECT:
        old, new = (reduce(lambda values, part: values.get(part, {}), key.split("."), each) for each in (there, here))
        if old != new:
            raise InputError(
                f"output: {output} holds the report of a run with {key} {old}, and this one has {new}; name another output, or "
                "set overwrite to true"
            )


def _check_lossless(config: EvalConfig, loaded: Loaded, tallies: Mapping[str, Tally]) -> dict[str, Any]:
    """Return the report's `lossless` section, of the answers to all suites."""
    plain, speculative = (
        [answer for tally in tallies.values() for answer in tally.of(mode)] for mode in (AUTOREGRESSIVE, SPECULATIVE)
    )
    return judge_lossless(loaded.target, plain, speculative, config.decode, config.lossless, loaded.draft.proposer)


def _time_others(config: EvalConfig, loaded: Loaded, records: Tally, report: Report) -> dict[str, Any]:
    """Return what else was timed: the cost model's predictions, where asked for, and transformers' `generate`."""
    found: dict[str, Any] = {}
    if report.speed is None:
        return found
    if config.cost is not None:
        plain, proposer = records.of(AUTOREGRESSIVE), loaded.draft.proposer
        found["predicted"] = predict_speed(loaded.target, proposer, plain, report, config.decode, config.cost)
    found["generate"] = time_generate(loaded.target, loaded.turns.first, config)
    return found


def _build_report(config: EvalConfig, loaded: Loaded, tallies: Mapping[str, Tally], how_chosen: str | None) -> Report:
    """Put the records and everything that says where they come from into the report; losslessness is checked afterwards."""
    suites, target, draft = loaded.suites, loaded.target, loaded.draft
    prompts = {suite.name: _prompt_set(suite, draft) for suite in suites}
    warnings = [*draft.warnings, *([] if how_chosen is None else [how_chosen])]
    for suite, settings in zip(suites, config.all_suites, strict=True):
        found = _suite_warnings(suite, settings, target, prompts[suite.name], tallies[suite.name])
        warnings += [f"{suite.name}: {warning}" if len(suites) > 1 else warning for warning in found]
    if config.decode.kv_cache is not None:
        warnings.append(
            "the target kept its keys and values in int8, in plain and in speculative decoding: both follow a distribution "
            "that is a little different from the target's own, and are compared with each other"
        )
    if target.runner.mixers:
        warnings.append(
            "the target has recurrent layers, which here read drafts one at a time, and shorter prompts of a batch twice: the "
            "measured speed is a lower bound of an engine's, which keeps a state a token; tau carries over"
        )
    first, *others = prompts
    return build_report(
        target=target.identity.to_dict()
        | {"dtype": config.target.dtype, "num_parameters": sum(each.numel() for each in target.model.parameters())},
        draft=draft.section,
        decode=_decode_section(config, target),
        prompts=prompts[first],
        records=tallies[first],
        suites={name: (prompts[name], tallies[name]) for name in others},
        lossless=UNCHECKED,
        decode_tokens=lambda ids: str(target.tokenizer.decode(list(ids), skip_special_tokens=False)),
        hardware=describe_hardware()
        | {"device": str(target.device), "threads": torch.get_num_threads(), "processes": loaded.state.num_processes},
        versions=describe_versions(),
        git=describe_git(),
        command=mask_arguments(sys.orig_argv),
        warnings=warnings,
        bootstrap_samples=config.bootstrap_samples,
        seed=config.decode.seed,
    )


def _prompt_set(suite: Suite, draft: EvaluatedDraft) -> PromptSet:
    seen = trained_on(suite.prompts, draft.paths)
    return PromptSet(
        suite=suite.name,
        source=suite.source,
        sha256=suite.sha256,
        format=suite.format,
        trained_on=seen,
        texts={prompt.prompt_id: prompt.turns[0] for prompt in suite.prompts},
        later_turns={prompt.prompt_id: prompt.turns[1:] for prompt in suite.prompts},
    )


def _suite_warnings(suite: Suite, settings: SuiteConfig, target: Target, prompts: PromptSet, records: Tally) -> Iterator[str]:
    """Yield what a reader must know of a suite's prompts."""
    if suite.num_turns_left_out:
        yield (
            f"{suite.num_turns_left_out} later turns of the suite's conversations were not asked: suite.max_turns is "
            f"{settings.max_turns}"
        )
    for count, outcome in ((suite.num_skipped, "were left out"), (suite.num_truncated, "lost the middle of their first turn")):
        if count:
            yield (
                f"{count} of the suite's prompts {outcome}, because they fill the target's context of {target.max_positions} "
                f"tokens: suite.on_too_long is {settings.on_too_long}"
            )
    if records.num_resumed:
        yield (
            f"{records.num_resumed} of {len(suite.prompts)} prompts were measured in an earlier session on this machine that "
            "was cut off; its speed may differ between the sessions, for all modes alike"
        )
    if seen := prompts.trained_on:
        yield (
            f"the draft was trained on {len(seen)} of the suite's {len(suite.prompts)} prompts, {', '.join(seen[:3])} among "
            "them; on these it recalls what it was trained on"
        )


def _decode_section(config: EvalConfig, target: Target) -> dict[str, Any]:
    return config.decode.model_dump(mode="json") | {
        "dtype": config.target.dtype,
        "attention": target.model.config._attn_implementation,
        "forward": config.target.forward,
        "verification": config.decode.rule,
        "compile": config.target.forward == "compiled",
        "warmup_prompts": config.warmup_prompts,
    }

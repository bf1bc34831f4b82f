"""One evaluation: decode every prompt plainly, with the draft and with the free baselines; check losslessness; report.

Several processes share the decoding (`measure_share`); the main one does the rest. `build_report` makes all numbers of the
report, `eval.report.schema` fixes its form, `eval.report.tables` and `eval.report.page` render it, `eval.release` judges it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from pydantic import ValidationError

from configs.runtime.command import DONE
from configs.runtime.errors import InputError, first_finding
from configs.runtime.files import folder_lock, read_json, write_json, write_text
from configs.runtime.redaction import mask_arguments, mask_secrets
from configs.runtime.run_record import describe_git, describe_hardware, describe_versions, fingerprint, write_run_record
from configs.runtime.terminal import say
from configs.schema.evaluation import EvalConfig
from eval.acceptance import Tally
from eval.decoder.decode import check_decodable
from eval.decoder.records import AUTOREGRESSIVE, OTHER_RULE, SPECULATIVE, WITH_LOOKUP, drop_batches
from eval.lossless import judge_lossless
from eval.measure.interleaved import (
    EvaluatedDraft,
    add_lookup,
    known_answers,
    load_evaluated,
    make_baselines,
    measure_share,
)
from eval.measure.suite import Suite, Turns, fit_suite, load_suites, trained_on
from eval.quality import check_references, judge_quality
from eval.report.page import render_html
from eval.report.schema import SCHEMA_VERSION, Report, SpeedSection, parse_report, write_report
from eval.report.tables import render_markdown
from eval.speed import compare_speed, find_meter, summarise_advantage, summarise_energy, summarise_speed, timings_within
from eval.stats import detectable_percent
from eval.timing import predict_speed, sweep_rounds
from heads.frozen.identity import locate
from heads.frozen.loading import Target, in_words, load_target, served_sampling
from heads.frozen.processes import join_processes
from heads.inference.lean_forward import forward_name

log = logging.getLogger("draftsmith")
# What comes after the measurement, or says where it goes: a run that is resumed may change these.
NOT_IN_FINGERPRINT = {"lossless", "cost", "quality", "output", "overwrite"}
PARTIAL = "report.partial.json"  # what was measured, before the answers are checked: a check may run out of memory
UNCHECKED = {"verdict": "inconclusive", "checked_prompts": 0, "divergences": []}
SUBJECT = ("target.name", "target.revision", "draft", "suite.path", "suite.subset", "suite.split")  # what a report is of
LEARNING = ("suffix_lookup", WITH_LOOKUP)  # ways of decoding that remember answers (`eval.measure.interleaved`)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What an evaluation decodes, and with what."""

    suites: list[Suite]
    turns: Turns  # of the prompts of all suites
    target: Target
    draft: EvaluatedDraft
    answers: Sequence[Sequence[int]]  # that suffix lookup knows from the start
    state: PartialState  # of the processes

    def fingerprint(self, config: EvalConfig) -> str:
        """Return the fingerprint of all that decides the records, and of the machine on which they are timed."""
        made_of = [*(suite.sha256 for suite in self.suites), self.target.identity.to_dict(), self.draft.section["sha256"]]
        machine = [describe_hardware(), describe_versions(), self.state.num_processes, torch.get_num_threads()]
        return fingerprint(config.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT), made_of, machine)


class Laps:
    """Seconds of a command's parts, which follow one another; a part may come again."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def done(self, part: str) -> None:
        """Add the time since the last part ended, or since this object was made, to `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items())


def evaluate(config: EvalConfig) -> int:
    """Evaluate as configured and write `report.json`, `.html`, `.md`, `records.jsonl` and `run.json`; return the exit code."""
    config = _with_sampling(config)
    laps, output = Laps(), Path(config.output)
    _check_output(output, config)
    suites = load_suites(config.all_suites)
    check_references(config.quality, suites[0].prompts)
    loaded = _load(config, suites)
    laps.done("loading")
    with folder_lock(output) if loaded.state.is_main_process else nullcontext():
        return _evaluate(config, loaded, suites, laps)


def _evaluate(config: EvalConfig, loaded: Loaded, suites: Sequence[Suite], laps: Laps) -> int:
    output, target, state = Path(config.output), loaded.target, loaded.state
    if state.is_main_process:
        write_run_record(output, config, processes=state.num_processes)
    state.wait_for_everyone()  # the folder is there
    proposers = {SPECULATIVE: loaded.draft.proposer, **make_baselines(config, target, loaded.answers)}
    if config.tries_other_verification:
        proposers[OTHER_RULE] = loaded.draft.proposer
    if config.tries_lookup:
        proposers[WITH_LOOKUP] = add_lookup(loaded.draft.proposer, config, target, loaded.answers)
    meter = find_meter(target.device, state.num_processes) if config.energy else None
    job, readable = loaded.fingerprint(config), None if isinstance(meter, str) else meter
    tallies = measure_share(target, loaded.turns, config, proposers, state, readable, job=job)
    if tallies is None:
        return DONE
    records = tallies[suites[0].name]
    laps.done("decoding")
    report = None
    if state.is_main_process:
        report = build_report(
            suites=[(suite, tallies[suite.name]) for suite in loaded.suites],
            lossless=UNCHECKED,
            quality=None,
            energy=None if meter is None else summarise_energy(records.timings, meter),
            warnings=[*loaded.draft.warnings, *_warnings(config, loaded, tallies)],
            **_describe(config, loaded),
        )
        write_report(output / PARTIAL, report)
    laps.done("report")
    # All groups of processes that share the target run it in the checks, and load it anew.
    answers = {mode: [each for tally in tallies.values() for each in tally.of(mode)] for mode in records.modes}
    plain = answers.pop(AUTOREGRESSIVE)
    lossless = judge_lossless(target, plain, answers, config.decode, config.lossless, loaded.draft.proposer)
    laps.done("losslessness")
    quality = judge_quality(target, records, suites[0].prompts, config.quality)
    laps.done("quality")
    if report is None:  # not the main process
        state.wait_for_everyone()
        return DONE
    report = parse_report(report.to_dict() | {"lossless": lossless, "quality": quality}, "the report just built")
    if target.group is not None:
        state.wait_for_everyone()  # the first process is the one that the others meet at
    laps.done("report")
    if report.speed is not None:
        _time_sweep(config, loaded, report, report.speed)
    laps.done("timing sweep")
    _write(output, report)
    laps.done("report")
    log.info("took: %s", laps)
    write_json(output / "seconds.json", laps.seconds)
    log.info("report in %s", output / "report.html")
    return DONE


def _with_sampling(config: EvalConfig) -> EvalConfig:
    """Take the target's own sampling where that is asked for; else say where engines would sample otherwise."""
    served = served_sampling(locate(config.target))
    if config.sampling_from == "generation_config":
        try:
            return config.sampled_by(served)
        except ValidationError as error:
            raise InputError(f"sampling_from: the target's {in_words(served)} does not fit: {first_finding(error)}") from error
    if in_words(served) and any(getattr(config.decode, key) != value for key, value in served.items()):
        log.warning(
            "the target's generation config sets %s, which engines apply to requests that name none; this report is of other "
            "sampling (sampling_from=generation_config measures by it)",
            in_words(served),
        )
    return config


def _load(config: EvalConfig, suites: Sequence[Suite]) -> Loaded:
    state = join_processes(config.target)
    target = load_target(config.target, for_chats=True)
    answers = known_answers(config, [prompt for suite in suites for prompt in suite.prompts], target.identity)
    draft = load_evaluated(config, target)
    for warning in draft.warnings:
        log.warning("%s", warning)
    fitted = [fit_suite(suite, target, each.on_too_long) for suite, each in zip(suites, config.all_suites, strict=True)]
    fitted = [replace(suite, trained_on=trained_on(suite.prompts, draft.paths)) for suite in fitted]
    suite_of = {prompt.prompt_id: suite.name for suite in fitted for prompt in suite.prompts}
    turns = Turns(target, [prompt for suite in fitted for prompt in suite.prompts], suite_of)
    check_decodable(target, turns.first, config.decode)
    return Loaded(suites=fitted, turns=turns, target=target, draft=draft, answers=answers, state=state)


def _write(output: Path, report: Report) -> None:
    write_report(output / "report.json", report)
    (output / PARTIAL).unlink()
    summary = render_markdown(report)
    write_text(output / "report.md", summary)
    write_text(output / "report.html", render_html(report))
    drop_batches(output)
    say(summary)


def _check_output(output: Path, config: EvalConfig) -> None:
    """Refuse to write over the report of another target, draft or suite, by the record beside it."""
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


def _time_sweep(config: EvalConfig, loaded: Loaded, report: Report, speed: SpeedSection) -> None:
    """Add to the report's speed what rounds of other sizes, timed after the suite, say of it."""
    target, cost = loaded.target, config.cost
    conditional = report.acceptance.position_conditional
    if cost is not None and any(conditional):
        sweep = sweep_rounds(target, loaded.draft.proposer, loaded.turns.first, config.decode, cost)
        speed.predicted = predict_speed(sweep, conditional, batch=config.decode.batch_size) if sweep else None
    if cost is not None and speed.predicted is None:
        log.warning("the draft proposed nothing, or nothing of it was accepted: there is no prediction of its speed")


def _describe(config: EvalConfig, loaded: Loaded) -> dict[str, Any]:
    target, forward = loaded.target, forward_name(loaded.target.model)
    return {
        "target": target.identity.to_dict()
        | {"dtype": config.target.dtype, "num_parameters": sum(each.numel() for each in target.model.parameters())},
        "draft": loaded.draft.section,
        "decode": config.decode.model_dump(mode="json")
        | {
            "dtype": config.target.dtype,
            "attention": target.model.config._attn_implementation,
            "forward": forward,
            "verification": config.decode.rule,
            "compile": False,
            "warmup_prompts": config.warmup_prompts,
            "lookup_expects": config.lookup_must_expect,
            "lookup_answer_tokens": sum(map(len, loaded.answers)),
        },
        "hardware": describe_hardware()
        | {"device": str(target.device), "threads": torch.get_num_threads(), "processes": loaded.state.num_processes},
        "versions": describe_versions(),
        "git": describe_git(),
        "command": mask_arguments(sys.orig_argv),
    }


def _warnings(config: EvalConfig, loaded: Loaded, tallies: Mapping[str, Tally]) -> Iterator[str]:
    for suite in loaded.suites:
        warnings, num_prompts = list(suite.warnings), len(suite.prompts)
        if resumed := tallies[suite.name].num_resumed:
            warnings.append(
                f"{resumed} of {num_prompts} prompts were measured in an earlier session on this machine that was cut off; its "
                "speed may differ between the sessions, for all modes alike"
            )
        if seen := suite.trained_on:
            warnings.append(
                f"the draft was trained on {len(seen)} of the suite's {num_prompts} prompts, {', '.join(seen[:3])} among them; "
                "on these it recalls what it was trained on"
            )
        yield from (f"{suite.name}: {warning}" if len(loaded.suites) > 1 else warning for warning in warnings)
    if config.decode.kv_cache is not None:
        yield (
            "the target kept its keys and values in int8, in plain and in speculative decoding: both follow a distribution "
            "that is a little different from the target's own, and are compared with each other"
        )
    if loaded.target.runner.mixers:
        yield (
            "the target has recurrent layers, which here read drafts one at a time, and shorter prompts of a batch twice: the "
            "measured speed is a lower bound of an engine's, which keeps a state a token; tau carries over"
        )


# --- from records to the report: numbers only, units in their names, `None` where a number is not available ------------


def build_report(*, suites: Sequence[tuple[Suite, Tally]], **sections: Any) -> Report:
    """Compute the report of one or several suites and what was decoded of each, the first being the one that it leads with.

    Answers may be missing, and the report says so. The other sections (target, draft, decode, losslessness, hardware, versions,
    git, command, warnings; quality, energy) are kept as they are given.
    """
    (first, records), *others = suites
    values = {
        "schema_version": SCHEMA_VERSION,
        **_suite(first, records),
        "suites": {suite.name: _suite(suite, own) for suite, own in others},
    }
    return parse_report({"git": None, "command": None, "warnings": []} | sections | values, "the report just built")


def _suite(suite: Suite, records: Tally) -> dict[str, Any]:
    if unknown := records.turns - set(suite.asked):
        raise ValueError("prompt {}, turn {} was decoded but is not among the prompts asked for".format(*min(unknown)))
    speculative = records.acceptance(SPECULATIVE)
    per_prompt = speculative.per_prompt
    committed, rounds = ([counts[column] for counts in per_prompt.values()] for column in (0, 1))
    others = [mode for mode in records.modes if mode not in (SPECULATIVE, OTHER_RULE, WITH_LOOKUP)]
    # The ratio of the draft over its drafts chosen otherwise, and of what has the lookup as well over the draft.
    pairs = {OTHER_RULE: (SPECULATIVE, OTHER_RULE), WITH_LOOKUP: (WITH_LOOKUP, SPECULATIVE)}
    return {
        "prompts": {
            "suite": suite.name,
            "source": suite.source,
            "format": suite.format,
            "sha256": suite.sha256,
            "ids": suite.ids,
            "num_asked": len(suite.prompts),
            "num_turns": len(suite.asked),
            "num_prompts": len(records.answered(suite.asked)),  # all their turns, in every mode
            "num_trained_on": None if suite.trained_on is None else len(suite.trained_on),
            "categories": records.categories,
            "failed": [
                {name: getattr(each, name) for name in ("prompt_id", "turn", "mode", "stop_reason")} for each in records.failed
            ],
        },
        "acceptance": {
            **speculative.summarise(),
            "detectable_change_percent": detectable_percent(committed, rounds),
            "per_prompt": per_prompt,
        },
        "speed": summarise_speed(records.timings),
        "by_category": {category: _category(records, category) for category in records.categories},
        "baselines": {mode: _other_way(records, mode, SPECULATIVE, mode) for mode in others},
        **{mode: _other_way(records, mode, *pair) if mode in records.modes else None for mode, pair in pairs.items()},
    }


def _category(records: Tally, category: str) -> dict[str, Any]:
    share = records.acceptance(SPECULATIVE, category)
    timings = timings_within(records.timings, set(share.counts))
    is_timed = {AUTOREGRESSIVE, SPECULATIVE} <= {timing.mode for timing in timings}
    return {
        "num_prompts": len(share.counts),
        "acceptance": share.summarise(),
        "speed": compare_speed(timings, SPECULATIVE) if is_timed else None,
    }


def _other_way(records: Tally, mode: str, above: str, below: str) -> dict[str, Any]:
    """Describe another way of decoding than the draft's, and the ratios of one mode over the other."""
    acceptance, timed = records.acceptance(mode).summarise(), any(each.mode == mode for each in records.timings)
    counted = [f"{name}{end}" for name in ("tokens_per_target_step", "overlap_alpha") for end in ("", "_ci")]
    counts = {each: records.acceptance(each).per_prompt for each in (above, below)}
    return {
        "num_speculative_tokens": records.num_drafts(mode),
        **{name: acceptance[name] for name in counted},
        **compare_speed(records.timings if timed else [], mode),
        **summarise_advantage(records.timings, counts, above, below),
        "learns_from_prompts": mode in LEARNING,
    }

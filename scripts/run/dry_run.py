"""The dry run: every stage once in small, by its own command, so that what is refused is refused in the first minutes.

It also measures what the plan is made of: the seconds of each stage that do not depend on how much there is to do, and the
seconds a prompt, a token and a step take on this machine.
"""

from __future__ import annotations

import math
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.runtime.command import BAD_INPUT, DONE
from configs.runtime.errors import InputError, RunFailed
from configs.runtime.files import read_jsonl, read_object, write_json
from configs.runtime.run_record import RECORD, fingerprint
from configs.runtime.terminal import say
from configs.schema.commands.running import RunConfig, Stage
from distill.dataset.conversations import MANIFEST
from distill.generation.prompts import choose_prompts, share_for
from scripts.run.request import Facts
from scripts.run.stages import HOUSE, decided_by, stage_command, start_of
from scripts.run.steps import run_step

FOLDER = "dry_run"
SECONDS = "seconds.json"  # by stage, of those that are done
ANSWER_TOKENS_ON_CPU, ANSWER_TOKENS = 64, 512  # at most ...
LONGER_FROM_MINUTES = 60  # ... twice as many on a CPU where there is time for it
# Where more than this share of them is cut off, a few prompts are answered at greater length, in this share of the budget
MANY_CUT, LONGER_SHARE, LONGER_PROMPTS, LONGEST_ANSWER = 0.1, 0.05, 16, 4096
LONGER = "longer"  # the folder of that
HELD_OUT = 8  # prompts
STEPS = 6  # of training, the first two of which warm up
LOG_LINES = 15  # of a failed stage's log
DECODED = 32  # tokens of each prompt of the evaluation
PROMPTS = 2  # of each suite of the evaluation
SETTLED = 0.7  # of its seconds a token are those of a longer evaluation: first rounds are slow, and an untrained draft fails
MORE_HELD_OUT = 2.0  # times its seconds are those of an evaluation in training, of more prompts


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a dry run measured; seconds of a stage are those that it takes for any amount of work."""

    fixed_seconds: dict[Stage, float]
    prompt_seconds: float  # to write, where the target does, and to answer
    prompt_tokens: float  # of a conversation's prompt
    answer_lengths: tuple[int, ...]  # as far as the dry run let them go
    cache_token_seconds: float  # the target's forward
    train_token_seconds: float  # of the draft's step, the target's states being read
    held_out_seconds: float  # of one evaluation on held-out prompts in training
    decoded_token_seconds: float  # in all ways that an evaluation decodes it, and to check it
    plain_token_seconds: float  # without a draft


def dry_run(run: RunConfig, facts: Facts) -> Rates:
    """Run every stage in small, or what is not done of it; an InputError or a RunFailed says what stage did not work."""
    small = _in_small(run, facts)
    output = Path(small.output)
    stages: list[Stage] = ["data", "cache", "train", "eval"]
    if run.engine is not None:
        stages.append("export")
    job = fingerprint([decided_by(small, stage) for stage in stages])
    done = read_object(output / SECONDS, "record of the dry run") if (output / SECONDS).is_file() else {}
    if done.get("job") != job:
        done = {"job": job}
    for stage in stages:
        if stage not in done:
            shutil.rmtree(output / stage, ignore_errors=True)  # of a dry run that was cut off: half of a stage tells no rate
            done[stage] = _timed(small, stage)
            write_json(output / SECONDS, done)
        if stage == "data" and LONGER not in done and (longer := _longer(small, run, facts)) is not None:
            shutil.rmtree(output / LONGER, ignore_errors=True)
            done[LONGER] = _timed(longer, stage)
            write_json(output / SECONDS, done)
        _check_budget(run, _seconds_of(done))
    return _rates(output, done)


def _seconds_of(done: Mapping[str, Any]) -> float:
    return sum(value for name, value in done.items() if name != "job")


def _check_budget(run: RunConfig, seconds: float) -> None:
    """Refuse a budget of which the dry run has taken more than half, before it takes the rest: the stages come after it."""
    if 2 * seconds > 60 * run.budget_minutes:
        raise InputError(
            f"--budget: {run.budget_minutes:g} minutes are too short: the dry run has taken {seconds / 60:.1f} so far; give "
            f"{math.ceil(4 * seconds / 60)}m or more, or a smaller target"
        )


def _in_small(run: RunConfig, facts: Facts) -> RunConfig:
    """Return a run with little of everything, on the answers of a few prompts alone where they would be mixed."""
    batch = facts.answer_batch_size
    number = min(2 * batch, facts.num_prompts or 2 * batch)
    tokens = ANSWER_TOKENS_ON_CPU * (1 + (run.budget_minutes >= LONGER_FROM_MINUTES)) if facts.on_cpu else ANSWER_TOKENS
    share = share_for(choose_prompts(facts.prompts, number), HELD_OUT) if facts.prompts else HELD_OUT / number
    data = {"answers.max_new_tokens": min(tokens, facts.context // 2), "answers.batch_size": batch, "held_out_share": share}
    train = {"schedule.max_steps": STEPS, "schedule.log_every_steps": 1, "schedule.trackers": []}
    evaluation: dict[str, Any] = {
        "suite.num_prompts": PROMPTS,
        "decode.max_new_tokens": DECODED,
        "repeats": 1,
    }
    evaluation |= {"suites": [HOUSE | {"num_prompts": PROMPTS}]}
    return run.model_copy(
        update={
            "output": str(Path(run.output) / FOLDER),
            "target": run.stage_target,
            "prompts": run.stage_prompts.model_copy(update={"num_prompts": number}),
            "refresh": None,
            "data": {**(run.data or {}), **data},
            "cache": {**facts.cached, **(run.cache or {})},
            "train": {**start_of(run), **(run.train or {}), **facts.rehearsed, **train},
            "eval": {**facts.cost(run), **(run.eval or {}), **evaluation},
        }
    )


def _longer(small: RunConfig, run: RunConfig, facts: Facts) -> RunConfig | None:
    """Return a run whose data stage lets a few answers go on to `LONGEST_ANSWER` tokens, as thinking takes.

    None where the answers of the small one have ended, or where that takes more than `LONGER_SHARE` of the budget.
    """
    output, settings = Path(small.output), small.data or {}
    counts = read_object(output / "data" / MANIFEST, "data manifest")["counts"]
    cut, answers = (sum(counts[side][name] for side in ("train", "held_out")) for name in ("cut_off", "answers"))
    seconds, tokens = read_object(output / "data" / RECORD, "run record")["seconds"], settings["answers.max_new_tokens"]
    step_seconds = seconds / tokens / math.ceil(answers / settings["answers.batch_size"])
    limit = min(LONGEST_ANSWER, facts.context // 2, int(LONGER_SHARE * 60 * run.budget_minutes / step_seconds))
    if cut < MANY_CUT * answers or limit < 2 * tokens:
        return None
    share = share_for(choose_prompts(facts.prompts, LONGER_PROMPTS), LONGER_PROMPTS // 2) if facts.prompts else 0.5
    data = {"answers.max_new_tokens": limit, "answers.batch_size": LONGER_PROMPTS, "held_out_share": share}
    prompts = small.prompts.model_copy(update={"num_prompts": LONGER_PROMPTS})
    return small.model_copy(update={"output": str(output / LONGER), "prompts": prompts, "data": settings | data})


def _timed(run: RunConfig, stage: Stage) -> float:
    """Run a stage, whose output goes into a log, and return its seconds; the log's end says why one failed."""
    log, started = Path(run.output) / f"{stage}.log", time.monotonic()
    code = run_step(stage_command(run, stage), log)
    seconds = time.monotonic() - started
    if code != DONE:
        last = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][-LOG_LINES:]
        say("\n".join(last), sys.stderr)
        if code == BAD_INPUT:
            raise InputError(f"dry run of the {stage} stage failed, see above")
        raise RunFailed(f"dry run of the {stage} stage ended with code {code}, see above and {log}")
    say(f"   {stage} {seconds:.1f} s")
    return seconds


def _rates(output: Path, seconds: dict[str, Any]) -> Rates:
    answering, caching = (read_object(output / stage / RECORD, "run record")["seconds"] for stage in ("data", "cache"))
    outcome = read_object(output / "train" / "outcome.json", "outcome of a training")
    report = read_object(output / "eval" / "report.json", "report")
    laps = read_object(output / "eval" / "seconds.json", "seconds of an evaluation")
    sides = [_rows_of(output, name) for name in ("train", "held_out")]
    rows = [*sides[0], *sides[1]]
    longer = [row for name in ("train", "held_out") for row in _rows_of(output / LONGER, name)]
    lengths = answer_lengths(rows, longer)
    seen = [length for row in rows for length, _ in _answers(row)]
    paces = [
        each["tokens_per_second"] for _, each in read_jsonl(output / "train" / "metrics.jsonl", "metrics") if "loss" in each
    ]
    start = seconds["eval"] - sum(laps.values())  # of Python, and of what it imports
    in_cache = sum(len(row["prompt_ids"]) + len(row["answer_ids"]) for row in sides[0])
    by_token = laps["decoding"] + laps["losslessness"]
    speeds = [each["speed"] for each in (report, *report["suites"].values())]
    decoded = sum(each["decode_tokens_autoregressive"] for each in speeds)
    fixed: dict[Stage, float] = {
        "dry_run": _seconds_of(seconds),
        "data": seconds["data"] - answering,
        "cache": seconds["cache"] - caching,
        "train": seconds["train"] - sum(outcome[name] for name in ("training_seconds", "evaluation_seconds", "sanity_seconds")),
        "eval": seconds["eval"] - by_token,
        "gate": start,
        "export": seconds.get("export", 0.0),
    }
    return Rates(
        fixed_seconds=fixed,
        prompt_seconds=answering / len(rows) * statistics.mean(lengths) / statistics.mean(seen),
        prompt_tokens=statistics.mean(len(row["prompt_ids"]) for row in rows),
        answer_lengths=lengths,
        cache_token_seconds=caching / in_cache,
        train_token_seconds=1 / statistics.median(paces[2:]),
        held_out_seconds=MORE_HELD_OUT * outcome["evaluation_seconds"],
        decoded_token_seconds=SETTLED * by_token / max(1, decoded),
        plain_token_seconds=sum(each["decode_seconds_autoregressive"] for each in speeds) / max(1, decoded),
    )


def answer_lengths(rows: Sequence[dict[str, Any]], longer: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Return the lengths of rows' answers; those that were cut off are as long as the answers of `longer` that are longer."""
    answers = [answer for row in rows for answer in _answers(row)]
    limit = max((length for length, ended in answers if not ended), default=0)
    tail = [length for row in longer for length, _ in _answers(row) if length > limit]
    cut = sum(not ended for _, ended in answers) if tail else 0
    known = [length for length, ended in answers if ended or not tail]
    return tuple(sorted([*known, *(tail[number % len(tail)] for number in range(cut))]))


def _answers(row: dict[str, Any]) -> list[tuple[int, bool]]:
    """Return the length of each answer of a row, and whether it has ended; of earlier ones that is not known."""
    return [*((end - start, True) for start, end in row.get("earlier", [])), (len(row["answer_ids"]), row["ended"])]


def _rows_of(output: Path, name: str) -> list[dict[str, Any]]:
    path = output / "data" / f"{name}.jsonl"
    return [row for _, row in read_jsonl(path, "data")] if path.is_file() else []

"""An advice from the prompts to the page: the target answers, trials are halved, and what they say is written."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from configs.runtime.command import BAD_INPUT, DONE
from configs.runtime.errors import InputError, RunFailed
from configs.runtime.files import sha256_of
from configs.runtime.resumable import fingerprint
from configs.runtime.run_record import write_run_record
from configs.schema.commands.advising import AdviceConfig
from configs.schema.data import DataConfig
from distill.dataset.conversations import MANIFEST, Conversation, read_conversations
from eval.cost.timing_sweep import check_sweep
from heads.frozen.loading import load_target
from scripts.advice.candidates import Candidate, make_candidates
from scripts.advice.curve import DataCurve, fit_curve
from scripts.advice.findings import Findings
from scripts.advice.halving import Rung, TimeBudget, sizes_up_to, successive_halving
from scripts.advice.page import write_advice
from scripts.advice.trials import Trials
from scripts.refresh_steps import commands

MULTIPLES = (2, 4, 16)  # of the answer tokens that the largest trial saw: what so many would bring is predicted
PROBED = 32  # prompts answered first, to see how long they take
ANSWERS = {"target", "prompts", "answers", "held_out_share", "seed"}  # settings that decide what the target answers


def advise(config: AdviceConfig) -> int:
    """Run what is not done of an advice and write it; return the exit code."""
    output = Path(config.output)
    make_candidates(config, output, sys.maxsize)  # a recipe that is wrong is refused before anything is run
    source = Path(config.prompts.path or "") if config.data is None else Path(config.data) / "train.jsonl"
    if config.prompts.source == "file" and not source.exists():
        raise InputError(f"prompts not found: {source}; name a file of prompts with --prompts, or a folder of data with data")
    made_of = sha256_of(source) if source.is_file() else str(source)
    job = fingerprint(config.model_dump(mode="json", include=ANSWERS), made_of)
    budget = TimeBudget(60 * config.budget_minutes, output / "budget.json", job)
    write_run_record(output, config)
    data = answer_prompts(config, budget, output / "data" / job[:12]) if config.data is None else Path(config.data)
    rows = held_out_rows(data, config)
    target = load_target(config.target, for_chats=True)
    check_sweep(target, config.cost)
    candidates = make_candidates(config, data, target.vocab_size)
    trials = Trials(config, budget, target, rows, data)
    sizes = sizes_up_to(config.first_conversations, config.growth, trials.num_conversations)
    rungs = successive_halving(
        candidates, sizes, trials.run, trials.score, keep_share=config.keep_share, may_begin=trials.may_begin
    )
    if not rungs:
        raise RunFailed("no trial came to an end: see the warnings above; raise --budget where there was no time for the first")
    curve = fit(trials, rungs[-1].ranked[0][0], rungs, config)
    findings = Findings(config, trials.measured, rungs, curve, trials.num_answer_tokens)
    budget.note()
    write_advice(findings, budget.spent, trials.num_conversations)
    return DONE


def answer_prompts(config: AdviceConfig, budget: TimeBudget, folder: Path) -> Path:
    """Let the target answer as many prompts as its share of the budget suffices for; return the folder of the conversations."""
    probe = folder.with_name(f"{folder.name}-first")
    if "num_prompts" not in budget.kept:
        started = time.monotonic()
        _make_data(config, PROBED, probe, config.output)
        asked = int(config.answer_share * budget.seconds / (time.monotonic() - started) * PROBED)
        budget.note(num_prompts=min(config.prompts.num_prompts, max(PROBED, asked)))
    if budget.kept["num_prompts"] <= PROBED:
        return probe
    if not (folder / MANIFEST).is_file():
        _make_data(config, budget.kept["num_prompts"], folder, config.output)
        budget.note()
    return folder


def _make_data(config: AdviceConfig, num_prompts: int, folder: Path, output: str) -> None:
    asked = DataConfig(
        target=config.target,
        prompts=config.prompts.model_copy(update={"num_prompts": num_prompts}),
        answers=config.answers,
        held_out_share=config.held_out_share,
        seed=config.seed,
        output=str(folder),
    )
    code = commands.call_with(asked, folder.name, Path(output))
    if code == BAD_INPUT:
        raise InputError("prompts: the target could not answer them, see above")
    if code != DONE:
        raise RunFailed(f"the target's answers: scripts/data.py ended with code {code}, see above")


def held_out_rows(data: Path, config: AdviceConfig) -> list[Conversation]:
    """Return the first turns of held-out prompts, but for the one that every training decodes."""
    rows = read_conversations(data / "held_out.jsonl")
    prompts = list(dict.fromkeys(row.prompt_id for row in rows))
    if len(prompts) < 3:
        raise InputError(
            f"prompts: {len(prompts)} of those answered are held out, and at least 3 are needed; give more prompts, a larger "
            "--budget or a larger held_out_share"
        )
    measured = set(prompts[1:][-config.num_prompts :])
    return [row for row in rows if row.prompt_id in measured and row.turn == 0]


def fit(trials: Trials, best: Candidate, rungs: list[Rung[Candidate]], config: AdviceConfig) -> DataCurve | None:
    """Return the curve through the best candidate's sizes; None where it was measured at one alone."""
    measured = [trials.measured[best.name, rung.size] for rung in rungs]
    if len(measured) < 2:
        return None
    counts = {each.answer_tokens: each.counts for each in measured}
    last = max(counts)
    sizes = sorted({trials.num_answer_tokens, *(multiple * last for multiple in MULTIPLES)} - {last})
    return fit_curve(counts, measured[0].longest + 1, sizes=sizes, samples=config.bootstrap_samples)

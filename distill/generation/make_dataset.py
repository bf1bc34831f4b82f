"""The data set from end to end: prompts, split, answers (the target's or the data set's own), the output folder.

Several processes (under `accelerate launch`) share the writing; the main one puts the folder in place. Until then finished work
is kept in journals in the output folder, from which an interrupted run resumes. Prompts are held in memory, their
answers are not.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState

from configs.runtime.errors import InputError
from configs.runtime.files import drop_leftovers, folder_lock, new_folder, sha256_of, write_json
from configs.runtime.redaction import mask_secrets
from configs.runtime.run_record import Journal, fingerprint, fingerprint_of, write_run_record
from configs.schema.data import DataConfig
from distill.dataset.conversations import FORMAT_VERSION, MANIFEST, WRITTEN_BY, share_rows, text_hash
from distill.generation.answers import ANSWER_JOURNALS, Answered, AnswerJob, existing_answers
from distill.generation.bad_rows import LeftOut, left_out_by
from distill.generation.prompts import Prompt, Split, fit_prompts, split_prompts
from distill.generation.rendering import check_answer_end
from distill.generation.self_seeding import self_seed
from distill.generation.server_answers import check_server, server_answer_job
from distill.generation.sources import answered_prompts, check_readable, list_prompts
from distill.server.connection import Connection
from heads.frozen.loading import Target, load_target
from heads.frozen.processes import join_processes, naming_lost_processes, share_of

logger = logging.getLogger("draftsmith")

PROMPT_JOURNAL = ".prompts.partial.jsonl"
LONGEST_WAIT_SECONDS = 86_400  # of processes for one that is still at its share
FEW_HELD_OUT = 8  # prompts, below which an interval over prompts says little
SPLIT_FILES = ("train.jsonl", "held_out.jsonl")
OUTPUTS = (*SPLIT_FILES, MANIFEST, "run.json")


def make_dataset(config: DataConfig) -> None:
    """Make `train.jsonl`, `held_out.jsonl`, `manifest.json` and `run.json` in `config.output`."""
    output = Path(config.output)
    check_output(output)
    asked = config.prompts
    left_out = left_out_by(asked)
    listed = list_prompts(asked, left_out)  # before the target is loaded: a mistake in a file shows at once
    with nullcontext() if config.server is None else Connection(config.server) as server:
        if server is not None:
            server.check_model()  # before a large target is loaded
        state = join_processes(config.target, timeout_seconds=LONGEST_WAIT_SECONDS)
        with naming_lost_processes(), folder_lock(output, beside=True) if state.is_main_process else nullcontext():
            _make_locked(config, listed, left_out, state, server)


def _make_locked(
    config: DataConfig, listed: list[Prompt] | None, left_out: LeftOut, state: PartialState, server: Connection | None
) -> None:
    output = Path(config.output)
    if state.is_main_process:
        drop_leftovers(output)
    state.wait_for_everyone()
    target = load_target(config.target, for_chats=True)
    check_answer_end(target)
    started = time.monotonic()
    share = share_of(target.group, state)
    if server is not None and share.number == 0:  # all that hold a part of the main process's target, which this runs
        check_server(server, target)
    state.wait_for_everyone()
    longest, unusable = config.prompts.max_prompt_tokens, dict[str, int]()
    if listed is None:
        listed, unusable = _self_seed_once(config, target, state)
        longest = None  # of the turns, which were ended in time, and not of their text in the template
    below = [prompt.below(config.prompts.system) for prompt in listed]
    prompts = fit_prompts(target, below, left_out, longest, shortens=True)
    if config.answers.written_by == "dataset":
        prompts = answered_prompts(prompts, left_out)
    left_out.check(len(prompts))
    left_out.counts.update(unusable)
    check_readable(prompts, written_here=server is None)
    split = split_prompts(prompts, config.held_out_share)
    if config.answers.written_by == "dataset":
        collect: Callable[[], Answered] = partial(existing_answers, target, config.answers.longest, left_out)
    else:
        job = answer_job(config, target, split, output, server)
        job.work(rank=share.number, num_processes=share.count, writes=share.writes)
        state.wait_for_everyone()
        collect = job.collect
    if state.is_main_process:
        write_dataset(config, target, split, collect(), left_out, len(prompts), started)
    state.wait_for_everyone()


def check_output(output: Path) -> None:
    """Raise `InputError` where this is no folder, or holds anything but an earlier run's data: it is replaced as a whole."""
    if output.exists() and not output.is_dir():
        raise InputError(f"output: {output} is a file; name a folder that is new or holds data made before")
    journals = {PROMPT_JOURNAL, *(path.name for path in output.glob(ANSWER_JOURNALS.format(rank="*")))}
    others = sorted({path.name for path in output.glob("*")} - journals - set(OUTPUTS))
    if others:
        raise InputError(f"output: {output} holds {others[0]}, which is not data made before; name a folder of its own")


def answer_job(config: DataConfig, target: Target, split: Split, folder: Path, server: Connection | None = None) -> AnswerJob:
    """Return the job of answering both sides of a split.

    Its fingerprint names what decides the answers alone: a new `held_out_share` reuses them where the prompts stay the same. It
    is of the messages and not of their tokens: a template may write the date, and a run may be resumed on the next day.
    """
    prompts = sorted([*split.train, *split.held_out], key=lambda prompt: prompt.prompt_id)
    content = fingerprint_of(
        [each.prompt_id, each.category, each.messages, each.turns, each.tools, each.media] for each in prompts
    )
    if server is not None:
        return server_answer_job(config, target, prompts, content, folder, server)
    return AnswerJob(
        target=target,
        prompts=prompts,
        config=config.answers,
        seed=config.seed,
        folder=folder,
        fingerprint=fingerprint(*_writer(config, target), config.answers.model_dump(), content),
    )


def write_dataset(
    config: DataConfig,
    target: Target,
    split: Split,
    answered: Answered,
    left_out: LeftOut,
    num_prompts: int,
    started: float,
) -> None:
    """Put the finished folder in place, all of it or nothing; one prompt's conversations are in memory at a time."""
    sides = {"train": split.train, "held_out": split.held_out}
    counts: dict[str, dict[str, Any]] = {}
    learnt = set[int]()
    with new_folder(Path(config.output)) as folder:
        for name, side in sides.items():
            counts[name] = _write_side(folder / f"{name}.jsonl", side, answered, learnt, trains=name == "train")
            if not counts[name]["conversations"]:
                left_out.log()
                raise InputError(f"no answer is left to any {name} prompt (dropped: {dict(answered.dropped)}); see above")
        dropped = left_out.counts + Counter(split.dropped) + Counter(answered.dropped)
        manifest = {
            "format_version": FORMAT_VERSION,
            "target": target.identity.to_dict(),
            WRITTEN_BY: config.answers.written_by,
            **({} if config.server is None else {"server": {"model": config.server.model}}),
            "config": mask_secrets(config.model_dump(mode="json")),
            "counts": {
                "prompts": num_prompts,
                "dropped": dict(sorted(dropped.items())),
                **counts,
            },
            "sha256": {f"{name}.jsonl": sha256_of(folder / f"{name}.jsonl") for name in sides},
        }
        write_json(folder / MANIFEST, manifest)
        write_run_record(folder, config, seconds=time.monotonic() - started)  # since the target was loaded, of this start
    left_out.log()
    answered.warn()
    for name, count in counts.items():
        said = [count[key] for key in ("conversations", "answer_tokens", "cut_off", "answers")]
        logger.info("%s: %d conversations, %d answer tokens; %d of %d answers were cut off", name, *said)
    if dropped:
        logger.info("dropped: %s", ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())))
    if (judged_by := counts["held_out"]["prompts"]) < FEW_HELD_OUT:
        found = f"{judged_by} of {num_prompts} prompts (held_out_share is {config.held_out_share:.2g})"
        logger.warning("held out: %s, too few to judge a draft by: give more prompts, or raise held_out_share", found)


def _self_seed_once(config: DataConfig, target: Target, state: PartialState) -> tuple[list[Prompt], dict[str, int]]:
    """Let the target write the prompts, or take those that an interrupted run of the same settings left."""
    job = fingerprint(*_writer(config, target), config.prompts.model_dump())
    journal = Journal(Path(config.output) / PROMPT_JOURNAL, job)
    if (kept := journal.read().get("prompts")) is not None:
        found = [Prompt(**each | {"turns": tuple(each["turns"])}) for each in kept["prompts"]]
        return found, kept["dropped"]
    share = share_of(target.group, state)
    written, dropped = self_seed(
        target,
        config.prompts,
        batch_size=config.answers.batch_size,
        seed=config.seed,
        rank=share.number,
        num_processes=share.count,
        exchange=share.gather,
    )
    if state.is_main_process:
        said = [{"prompt_id": each.prompt_id, "category": each.category, "turns": each.turns} for each in written]
        journal.append("prompts", {"prompts": said, "dropped": dropped})
    return written, dropped


def _writer(config: DataConfig, target: Target) -> tuple[Any, ...]:
    """Return what decides the tokens that a target writes, apart from the prompts and the sampling."""
    settings = config.target
    return (FORMAT_VERSION, target.identity.to_dict(), settings.dtype, settings.attention, settings.forward, config.seed)


def _write_side(path: Path, prompts: Sequence[Prompt], answered: Answered, learnt: set[int], *, trains: bool) -> dict[str, Any]:
    """Write a side's conversations and count them. `learnt` are hashes of what is asked in turns that are trained on.

    Chats of both sides may begin with the same turn, which is then held out of neither: it is no held-out conversation.
    """
    total, kinds = Counter[str](), Counter[str]()
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            found = answered.rows_of(prompt)
            turns = [row for row in found if trains or text_hash(row.user_text) not in learnt]
            total.update(prompts=bool(turns), also_in_train=len(found) - len(turns))
            for turn in turns:
                total.update(answers=1, answer_tokens=len(turn.answer_ids), cut_off=not turn.ended)
            for row in share_rows(turns) if trains else turns:
                file.write(row.to_line())
                total["conversations"] += 1
                kinds[row.category] += 1
                learnt.update(map(text_hash, row.user_texts if trains else ()))
    return {
        **{name: total[name] for name in ("prompts", "conversations", "answers", "answer_tokens", "cut_off", "also_in_train")},
        "by_kind": dict(sorted(kinds.items())),
    }

"""The data set from end to end: prompts of all sources, split, answers (the target's or the data set's own), the output folder.

Several processes (under `accelerate launch`) share the writing; the main one puts the folder in place. Until then finished work
is kept in journals in the output folder, from which an interrupted run resumes. Prompts are held in memory, their
answers are not.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate import PartialState

from configs.runtime.errors import InputError
from configs.runtime.files import drop_leftovers, folder_lock, new_folder, sha256_of, write_json
from configs.runtime.redaction import mask_secrets
from configs.runtime.resumable import Journal, fingerprint, fingerprint_of
from configs.runtime.run_record import write_run_record
from configs.schema.data import DataConfig, PromptsConfig
from distill.dataset.conversations import FORMAT_VERSION, INDEX_SUFFIX, MANIFEST, WRITTEN_BY
from distill.generation.answers import ANSWER_JOURNALS, Answered, AnswerJob, existing_answers
from distill.generation.prompts import TRUNCATED, Prompt, encode_prompt, everything_said, fit_prompts
from distill.generation.self_seeding import self_seed
from distill.generation.server_answers import check_server, server_answer_job
from distill.generation.sources import Admission, check_given, check_readable, list_source
from distill.generation.split import Split, split_prompts
from distill.generation.steering import SEEDS
from distill.server.connection import Connection
from heads.frozen.loading import Target, load_target
from heads.frozen.processes import join_processes, naming_lost_processes, share_of

logger = logging.getLogger("draftsmith")

PROMPT_JOURNAL = ".prompts.partial.jsonl"
FEW_HELD_OUT = 8  # prompts, below which an interval over prompts says little
SPLIT_FILES = ("train.jsonl", "held_out.jsonl")
OUTPUTS = (*SPLIT_FILES, *(name + INDEX_SUFFIX for name in SPLIT_FILES), MANIFEST, "run.json")  # indices: of training


def make_dataset(config: DataConfig) -> None:
    """Make `train.jsonl`, `held_out.jsonl`, `manifest.json` and `run.json` in `config.output`."""
    output = Path(config.output)
    check_output(output)
    # Before the target is loaded: a mistake in a file shows at once.
    listed = [list_source(settings) for _, settings in config.prompts.parts]
    with nullcontext() if config.server is None else Connection(config.server) as server:
        if server is not None:
            server.check_model()  # before a large target is loaded
        state = join_processes(config.target, timeout_seconds=config.process_timeout_seconds)
        with naming_lost_processes(), folder_lock(output, beside=True) if state.is_main_process else nullcontext():
            _make_locked(config, listed, state, server)


@dataclass
class _Gathered:
    """Prompts of all sources, how many were dropped, by reason, and for each of several sources what it gave."""

    prompts: list[Prompt] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    sources: dict[str, Any] = field(default_factory=dict)


def _make_locked(
    config: DataConfig, listed: Sequence[Iterable[Prompt] | None], state: PartialState, server: Connection | None
) -> None:
    """Do this process's part of the run that holds the folder's lock."""
    output = Path(config.output)
    if state.is_main_process:
        drop_leftovers(output)
    state.wait_for_everyone()
    target = load_target(config.target, for_chats=True)
    started = time.monotonic()
    share = share_of(target.group, state)
    if server is not None and share.number == 0:  # all that hold a part of the main process's target, which this runs
        check_server(server, target)
    state.wait_for_everyone()
    gathered = _gather(config, target, listed, state)
    check_readable(target, gathered.prompts, written_here=server is None)
    split = split_prompts(gathered.prompts, config.held_out_share)
    if config.answers.written_by == "dataset":
        check_given(gathered.prompts)
        collect: Callable[[], Answered] = partial(existing_answers, target, config.answers.max_new_tokens)
    else:
        job = answer_job(config, target, split, output, server)
        job.work(rank=share.number, num_processes=share.count, writes=share.writes)
        state.wait_for_everyone()
        collect = job.collect
    if state.is_main_process:
        write_dataset(config, target, split, collect(), gathered, started)
    state.wait_for_everyone()


def _gather(config: DataConfig, target: Target, listed: Sequence[Iterable[Prompt] | None], state: PartialState) -> _Gathered:
    """Take each source's share of the prompts; those that an earlier source gave, or outside its limits, do not count."""
    gathered, taken = _Gathered(), set[str]()
    for (source, settings), given in zip(config.prompts.parts, listed, strict=True):
        several = Admission(target=target, source=source, taken=taken) if source.name else None
        given = None if given is None else (prompt.below(settings.system) for prompt in given)
        if given is None:
            written, dropped = _self_seed_once(config, source.name, settings, target, state, several)
            prompts = [prompt.below(settings.system) for prompt in written]
        elif several is None:
            first = list(islice(given, settings.num_prompts))
            if len(first) < settings.num_prompts:
                logger.info("%s holds %d prompts, fewer than num_prompts = %d", settings.path, len(first), settings.num_prompts)
            prompts, dropped = fit_prompts(target, first, settings.on_too_long, config.answers.max_new_tokens)
        else:
            prompts, dropped = several.first(given, settings, config.answers.max_new_tokens)
        if several is not None:
            if len(prompts) < settings.num_prompts:
                logger.warning("source %s gave %d prompts of its %d", source.name, len(prompts), settings.num_prompts)
            gathered.sources[source.name] = {"share": settings.num_prompts, "prompts": len(prompts), "dropped": dict(dropped)}
            prompts = [several.named(prompt) for prompt in prompts]
        gathered.prompts += prompts
        gathered.dropped.update(dropped)
    return gathered


def check_output(output: Path) -> None:
    """Raise `InputError` where this is no folder, or holds anything but an earlier run's data: it is replaced as a whole."""
    if output.exists() and not output.is_dir():
        raise InputError(f"output: {output} is a file; name a folder that is new or holds data made before")
    journals = {PROMPT_JOURNAL, *(path.name for path in output.glob(ANSWER_JOURNALS.format(rank="*")))}
    others = sorted({path.name for path in output.glob("*")} - journals - set(OUTPUTS))
    if others:
        raise InputError(f"output: {output} holds {others[0]}, which is not data made before; name a folder of its own")


def answer_job(config: DataConfig, target: Target, split: Split, folder: Path, server: Connection | None = None) -> AnswerJob:
    """Return the job of answering both sides of a split; `InputError` where a prompt does not fit.

    Its fingerprint names what decides the answers alone: a new `held_out_share` reuses them where the prompts stay the same.
    """
    prompts = sorted([*split.train, *split.held_out], key=lambda prompt: prompt.prompt_id)
    lengths: list[int] = []

    def rows() -> Iterator[list[Any]]:
        for prompt in prompts:
            ids = encode_prompt(target, prompt)
            lengths.append(len(ids))
            yield [prompt.prompt_id, prompt.category, *prompt.turns, *ids, prompt.max_new_tokens, *prompt.media]

    content = fingerprint_of(rows())
    if server is not None:
        return server_answer_job(config, target, prompts, content, folder, server)
    return AnswerJob(
        target=target,
        prompts=prompts,
        config=config.answers,
        seed=config.seed,
        folder=folder,
        fingerprint=fingerprint(*_writer(config, target), config.answers.model_dump(), content),
        lengths=lengths,
    )


def write_dataset(
    config: DataConfig, target: Target, split: Split, answered: Answered, gathered: _Gathered, started: float
) -> None:
    """Put the finished folder in place, all of it or nothing; one prompt's conversations are in memory at a time."""
    sides = {"train": split.train, "held_out": split.held_out}
    counts: dict[str, dict[str, Any]] = {}
    dropped = gathered.dropped + Counter(split.dropped)
    with new_folder(Path(config.output)) as folder:
        for name, side in sides.items():
            counts[name] = _write_side(folder / f"{name}.jsonl", side, answered)
            if not counts[name]["conversations"]:
                raise InputError(
                    f"no answer is left to any of the {len(side)} {name} prompts (dropped: {dict(answered.dropped)})"
                )
        manifest = {
            "format_version": FORMAT_VERSION,
            "target": target.identity.to_dict(),
            WRITTEN_BY: config.answers.written_by,
            **({} if config.server is None else {"server": {"model": config.server.model}}),
            "config": mask_secrets(config.model_dump(mode="json")),
            "counts": {
                "prompts": len(gathered.prompts),
                "truncated": dropped.pop(TRUNCATED, 0),
                "dropped": dict(sorted((dropped + Counter(answered.dropped)).items())),
                **({"sources": gathered.sources} if gathered.sources else {}),
                **counts,
            },
            "sha256": {f"{name}.jsonl": sha256_of(folder / f"{name}.jsonl") for name in sides},
        }
        write_json(folder / MANIFEST, manifest)
        write_run_record(folder, config, seconds=time.monotonic() - started)  # since the target was loaded, of this start
    for name, count in counts.items():
        logger.info("%s: %d conversations, %d answer tokens", name, count["conversations"], count["answer_tokens"])
    if (judged_by := counts["held_out"]["prompts"]) < FEW_HELD_OUT:
        found = f"{judged_by} of {len(gathered.prompts)} prompts (held_out_share is {config.held_out_share:.2g})"
        logger.warning("held out: %s, too few to judge a draft by: give more prompts, or raise held_out_share", found)


def _self_seed_once(
    config: DataConfig, name: str, settings: PromptsConfig, target: Target, state: PartialState, admission: Admission | None
) -> tuple[list[Prompt], dict[str, int]]:
    """Let the target write a source's prompts, or take those that an interrupted run of the same settings left."""
    # Of all sources: they share the journal.
    job = fingerprint(*_writer(config, target), config.prompts.model_dump(), sha256_of(SEEDS))
    journal = Journal(Path(config.output) / PROMPT_JOURNAL, job)
    if (kept := journal.read().get(name)) is not None:
        prompts = [
            Prompt(prompt_id=each["prompt_id"], category=each["category"], turns=tuple(each["turns"]))
            for each in kept["prompts"]
        ]
        if admission is not None:
            admission.taken.update(map(everything_said, prompts))
        return prompts, kept["dropped"]
    share = share_of(target.group, state)
    written, dropped = self_seed(
        target,
        settings,
        batch_size=config.answers.batch_size,
        seed=config.seed,
        name=name,
        rank=share.number,
        num_processes=share.count,
        exchange=share.gather,
        admission=admission,
    )
    if state.is_main_process:
        journal.append(name, {"prompts": [asdict(prompt) for prompt in written], "dropped": dropped})
    return written, dropped


def _writer(config: DataConfig, target: Target) -> tuple[Any, ...]:
    """Return what decides the tokens that a target writes, apart from the prompts and the sampling."""
    settings = config.target
    return (FORMAT_VERSION, target.identity.to_dict(), settings.dtype, settings.attention, settings.forward, config.seed)


def _write_side(path: Path, prompts: Sequence[Prompt], answered: Answered) -> dict[str, Any]:
    total, kinds, sources = Counter[str](), Counter[str](), Counter[str]()
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            rows = answered.rows_of(prompt)
            total["prompts"] += bool(rows)
            for row in rows:
                file.write(row.to_line())
                total.update(conversations=1, answer_tokens=len(row.answer_ids), cut_off=not row.ended)
                kinds[row.category] += 1
            if rows and prompt.source:
                sources[prompt.source] += len(rows)
    return {
        **{name: total[name] for name in ("prompts", "conversations", "answer_tokens", "cut_off")},
        "by_kind": dict(sorted(kinds.items())),
        **({"by_source": dict(sorted(sources.items()))} if sources else {}),
    }

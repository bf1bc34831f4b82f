"""`records.jsonl`: one JSON line for each generation and each timing, written while the run goes on.

Each process writes a file of its own, and a journal of the batches in it; the main one joins the batches of all of them in
order at the end. A run that was cut off leaves both, and the next one of the same job takes what was finished from them.
Rounds are stored as columns, without what was not measured; their committed tokens are slices of the answer, so only their
numbers are kept.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from configs.runtime.errors import InputError, first_line
from configs.runtime.resumable import Journal
from eval.decoder.records import DistributionComparison, Generation, Round, Timing
from heads.inference.media_inputs import MediaPrompt

log = logging.getLogger("draftsmith")

RECORDS = "records.jsonl"
PART = ".records.part-{rank}.jsonl"
JOURNAL = ".records.journal-{rank}.jsonl"  # the place of each finished batch in the part: [start, end]


@dataclass(frozen=True)
class RecordSpan:
    """The lines of one batch: bytes `start` to before `end` of `path`."""

    batch: int
    path: Path
    start: int
    end: int


class RecordWriter:
    """Writes one process's batches into a folder, each on the disk before the next begins. A context manager.

    Args:
        folder: exists.
        rank: of the process.
        job: what decides the records; batches that an interrupted run with the same job left are kept.

    Raises:
        InputError: a file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, job: str = "") -> None:
        self.path = folder / PART.format(rank=rank)
        self._journal = Journal(folder / JOURNAL.format(rank=rank), job)
        kept = self._journal.read()
        self._spans = {int(batch): RecordSpan(int(batch), self.path, *ends) for batch, ends in kept.items()}
        try:
            self._file: IO[bytes] = self.path.open("r+b" if kept else "wb")
            self._file.seek(max((span.end for span in self._spans.values()), default=0))
            self._file.truncate()
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error

    @property
    def spans(self) -> list[RecordSpan]:
        """The batches that are written, also by the run before."""
        return list(self._spans.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def write(self, batch: int, generations: Iterable[Generation], timings: Iterable[Timing]) -> None:
        """Append the records of a batch, `batch` being its number in the run."""
        lines = [json.dumps({"generation": to_values(generation)}) for generation in generations]
        lines += [json.dumps({"timing": asdict(timing)}) for timing in timings]
        start = self._file.tell()
        try:
            self._file.write("".join(line + "\n" for line in lines).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._spans[batch] = RecordSpan(batch, self.path, start, self._file.tell())
        self._journal.append(str(batch), [start, self._file.tell()])

    def finished(self, batch: int) -> list[Generation | Timing] | None:
        """Return the records of a batch; None where it was not written yet, was cut off, or could not be decoded: it is tried
        again.
        """
        if (span := self._spans.get(batch)) is None:
            return None
        try:
            records = [_parse(line, f"records {self.path}, batch {batch}") for line in _bytes_of(span).decode().splitlines()]
        except (InputError, UnicodeDecodeError) as error:
            log.info("%s; it is decoded again", first_line(error))
            return None
        broken = any(isinstance(each, Generation) and each.stop_reason == "error" for each in records)
        return None if broken else records


def join_parts(folder: Path, spans: Sequence[RecordSpan]) -> Path:
    """Join the batches of all processes in order into `records.jsonl` and return the file's path.

    Raises:
        ValueError: a batch is there twice, or one is missing.
    """
    spans = sorted(spans, key=lambda span: span.batch)
    if [span.batch for span in spans] != list(range(len(spans))):
        raise ValueError(f"the processes wrote batches {[span.batch for span in spans]}, not each of them once")
    whole = folder / f"{RECORDS}.partial"
    with whole.open("wb") as out:
        for span in spans:
            out.write(_bytes_of(span))
    return whole.replace(folder / RECORDS)


def drop_parts(folder: Path) -> None:
    """Remove the processes' parts and journals, after which a run begins anew."""
    for pattern in (JOURNAL, PART):
        for path in folder.glob(pattern.format(rank="*")):
            path.unlink()


def _bytes_of(span: RecordSpan) -> bytes:
    with span.path.open("rb") as part:
        part.seek(span.start)
        return part.read(span.end - span.start)


def read_records(path: Path) -> Iterator[Generation | Timing]:
    """Yield the generations and timings of a record file.

    Raises:
        InputError: it cannot be read, or a line (named) is no record.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield _parse(line, f"records {path}, line {number}")
    except OSError as error:
        raise InputError(f"cannot read records {path}: {error.strerror or error}") from error


def _parse(line: str, where: str) -> Generation | Timing:
    try:
        values = json.loads(line)
        if "generation" in values:
            return from_values(values["generation"])
        return Timing(**{**values["timing"], "prompt_ids": tuple(values["timing"]["prompt_ids"])})
    except (ValueError, KeyError, TypeError) as error:  # ValueError: not JSON, or a number of thousands of digits
        raise InputError(f"{where} is neither a generation nor a timing: {error!r}") from error


def to_values(generation: Generation) -> dict[str, Any]:
    """Return a generation as JSON values."""
    rounds = generation.rounds
    columns: dict[str, list[Any]] = {"committed": [len(round_.committed) for round_ in rounds]}
    if any(round_.drafted for round_ in rounds):
        columns["drafted"] = [round_.drafted for round_ in rounds]
        columns["accepted"] = [round_.num_accepted for round_ in rounds]
    if any(round_.num_nodes is not None for round_ in rounds):
        columns["ranks"] = [round_.ranks for round_ in rounds]
        columns["num_nodes"] = [round_.num_nodes for round_ in rounds]
    if any(round_.by_lookup for round_ in rounds):
        columns["by_lookup"] = [round_.by_lookup for round_ in rounds]
    if any(round_.overlap is not None for round_ in rounds):
        columns["overlap"] = [round_.overlap for round_ in rounds]
        columns["laws"] = [
            None if round_.distributions is None else list(vars(round_.distributions).values()) for round_ in rounds
        ]
    values = {name: value for name, value in vars(generation).items() if name not in ("rounds", "media_prompt")}
    pictured = {} if generation.media_prompt is None else {"media_prompt": vars(generation.media_prompt)}
    return values | pictured | {"rounds": columns}


def from_values(values: dict[str, Any]) -> Generation:
    """Return the generation that `to_values` described."""
    tokens, columns = tuple(values["tokens"]), values["rounds"]
    count = len(columns["committed"])
    ends = accumulate(columns["committed"], initial=1)  # the first token is the prefill's
    nothing: list[Any] = [None] * count
    rows = zip(
        pairwise(ends),
        columns.get("drafted", [()] * count),
        columns.get("accepted", [0] * count),
        columns.get("overlap", nothing),
        columns.get("laws", nothing),
        columns.get("ranks", nothing),
        columns.get("num_nodes", nothing),
        columns.get("by_lookup", [False] * count),
        strict=True,
    )
    rounds = tuple(
        Round(
            drafted=tuple(drafted),
            num_accepted=accepted,
            committed=tokens[start:end],
            overlap=None if overlap is None else tuple(overlap),
            distributions=None if distributions is None else DistributionComparison(*map(tuple, distributions)),
            ranks=None if ranks is None else tuple(ranks),
            num_nodes=num_nodes,
            by_lookup=by_lookup,
        )
        for (start, end), drafted, accepted, overlap, distributions, ranks, num_nodes, by_lookup in rows
    )
    given: dict[str, Any] = {"prompt_tokens": tuple(values["prompt_tokens"]), "tokens": tokens, "rounds": rounds}
    if (pictured := values.get("media_prompt")) is not None:
        given["media_prompt"] = MediaPrompt(text=pictured["text"], media=tuple(pictured["media"]))
    return Generation(**{**values, **given})

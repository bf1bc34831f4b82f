"""`records.jsonl`: one JSON line for each generation and each timing.

While a run goes on, each batch is a file of its own, written at once; the main process joins them in order at the end. A run
that was cut off leaves them, and the next one of the same job takes what was finished from them. Rounds are stored as columns,
without what was not measured; their committed tokens are slices of the answer, so only their numbers are kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from configs.runtime.errors import InputError
from configs.runtime.files import write_bytes
from configs.runtime.resumable import Journal
from eval.decoder.records import DistributionComparison, Generation, Round, Timing
from heads.frozen.media import MediaPrompt

RECORDS = "records.jsonl"
BATCHES = ".batches-"  # then the job: a folder of one file for each finished batch
CHOICE = ".choice-{key}.jsonl"


class BatchFiles:
    """The finished batches of a run, by number, which all of its processes write and read.

    Args:
        output: the run's folder, which exists.
        job: fingerprint of what decides the records.
    """

    def __init__(self, output: Path, job: str) -> None:
        self.output, self.folder = output, output / f"{BATCHES}{job[:16]}"
        self.folder.mkdir(exist_ok=True)

    def write(self, batch: int, generations: Iterable[Generation], timings: Iterable[Timing]) -> None:
        """Write the records of a batch.

        Raises:
            InputError: the file cannot be written.
        """
        lines = [json.dumps({"generation": to_values(generation)}) for generation in generations]
        lines += [json.dumps({"timing": asdict(timing)}) for timing in timings]
        write_bytes(self._path(batch), "".join(line + "\n" for line in lines).encode())

    def finished(self, batch: int) -> list[Generation | Timing] | None:
        """Return the records of a batch; None where it was not written yet, or could not be decoded: it is tried again."""
        if not self._path(batch).exists():
            return None
        records = list(read_records(self._path(batch)))
        broken = any(isinstance(each, Generation) and each.stop_reason == "error" for each in records)
        return None if broken else records

    def join(self, num_batches: int) -> Path:
        """Join the batches in order into `records.jsonl` and return the file's path.

        Raises:
            FileNotFoundError: a batch is missing.
        """
        whole = self.output / f"{RECORDS}.partial"
        with whole.open("wb") as out:
            for batch in range(num_batches):
                out.write(self._path(batch).read_bytes())
        return whole.replace(self.output / RECORDS)

    def _path(self, batch: int) -> Path:
        return self.folder / f"{batch}.jsonl"


def drop_batches(output: Path) -> None:
    """Remove what an interrupted run would go on from."""
    for folder in output.glob(f"{BATCHES}*"):
        shutil.rmtree(folder)
    earlier = (".records.part-*", ".records.journal-*")  # of an earlier release
    for pattern in (CHOICE.format(key="*"), *earlier):
        for path in output.glob(pattern):
            path.unlink()


def choose_once(output: Path, key: str, job: str, state: PartialState, choose: Callable[[], Any]) -> Any:
    """Return what all processes `choose`, the main one's for everyone; JSON values, kept for when the run is interrupted."""
    journal = Journal(output / CHOICE.format(key=key), job)
    (known,) = broadcast_object_list([journal.read().get(key) if state.is_main_process else None])
    if known is None:
        (known,) = broadcast_object_list([choose()])
        if state.is_main_process:
            journal.append(key, known)
    return known


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

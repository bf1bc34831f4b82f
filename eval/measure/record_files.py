"""`records.jsonl`: one JSON line for each generation and each timing.

While a run goes on, each batch is a file of its own, written at once; the main process joins them in order at the end. A run
that was cut off leaves them, and the next one of the same job takes what was finished from them. Rounds are stored as columns,
without what was not measured; their committed tokens are slices of the answer, so only their numbers are kept.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from configs.runtime.errors import InputError
from configs.runtime.files import write_bytes
from eval.decoder.records import Generation, Round, Timing
from heads.frozen.media import MediaPrompt

RECORDS = "records.jsonl"
BATCHES = ".batches-"  # then the job: a folder of one file for each finished batch
# The columns of rounds beside the number of committed tokens, each with the value that is left out where all rounds have it.
USUAL: dict[str, Any] = {
    "drafted": (),
    "num_accepted": 0,
    "overlap": None,
    "uncovered": None,
    "ranks": None,
    "num_nodes": None,
}


@dataclass
class Records:
    """The generations and timings of a measurement."""

    generations: list[Generation] = field(default_factory=list)  # of the first repeat
    timings: list[Timing] = field(default_factory=list)

    def of(self, mode: str) -> list[Generation]:
        """Return one mode's generations in the order of the prompts."""
        return [generation for generation in self.generations if generation.mode == mode]

    def extend(self, other: Records) -> None:
        self.generations += other.generations
        self.timings += other.timings


class BatchFiles:
    """The finished batches of a run, by number, which all of its processes write and read.

    `job` is a fingerprint of what decides the records.
    """

    def __init__(self, output: Path, job: str) -> None:
        self.output, self.folder = output, output / f"{BATCHES}{job[:16]}"
        self.folder.mkdir(exist_ok=True)

    def write(self, batch: int, records: Records) -> None:
        lines = [json.dumps({"generation": to_values(generation)}) for generation in records.generations]
        lines += [json.dumps({"timing": asdict(timing)}) for timing in records.timings]
        write_bytes(self._path(batch), "".join(line + "\n" for line in lines).encode())

    def finished(self, num_batches: int) -> set[int]:
        """Return which batches need not be decoded again: those that were written, and in which no decoding failed."""
        written = [number for number in range(num_batches) if self._path(number).exists()]
        return {number for number in written if all(each.stop_reason != "error" for each in self.read(number).generations)}

    def read(self, batch: int) -> Records:
        """Return the records of a batch that was written."""
        return read_records(self._path(batch))

    def join(self, num_batches: int) -> Path:
        """Join the batches in order into `records.jsonl` and return the file's path."""
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


def read_records(path: Path) -> Records:
    """Return the generations and timings of a record file."""
    records = Records()
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            if "generation" in values:
                records.generations.append(from_values(values["generation"]))
            else:
                timing = values["timing"]
                records.timings.append(Timing(**{**timing, "prompt_ids": tuple(timing["prompt_ids"])}))
    except OSError as error:
        raise InputError(f"cannot read records {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:  # ValueError: not JSON, or a number of thousands of digits
        raise InputError(f"records {path} hold what is neither a generation nor a timing: {error!r}") from error
    return records


def to_values(generation: Generation) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {"committed": [len(round_.committed) for round_ in generation.rounds]}
    for name, usual in USUAL.items():
        column = [getattr(round_, name) for round_ in generation.rounds]
        if any(value != usual for value in column):
            columns[name] = column
    pictured = None if generation.media_prompt is None else vars(generation.media_prompt)
    return vars(generation) | {"rounds": columns, "media_prompt": pictured}


def from_values(values: dict[str, Any]) -> Generation:
    tokens, columns = tuple(values["tokens"]), dict(values["rounds"])
    ends = accumulate(columns.pop("committed"), initial=1)  # the first token is the prefill's
    rounds = []
    for number, (start, end) in enumerate(pairwise(ends)):
        own = {name: _tuples(column[number]) for name, column in columns.items()}
        rounds.append(Round(**USUAL | own | {"committed": tokens[start:end]}))
    given: dict[str, Any] = {"prompt_tokens": tuple(values["prompt_tokens"]), "tokens": tokens, "rounds": tuple(rounds)}
    if (pictured := values["media_prompt"]) is not None:
        given["media_prompt"] = MediaPrompt(text=pictured["text"], media=tuple(pictured["media"]))
    return Generation(**values | given)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

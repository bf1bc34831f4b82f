"""What is decoded and what came of it: requests, their rows in a batch, rounds, generations, timings and the clock of these.

The decoder makes the records, `eval.acceptance` and `eval.speed` read them. `records.jsonl` has a JSON line for each generation
and each timing. While a run goes on, each batch is a file of its own, written at once; the main process joins them in order at
the end. A run that was cut off leaves them, and the next one of the same job takes what was finished from them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from configs.runtime.errors import InputError
from configs.runtime.files import write_bytes
from configs.schema.decoding import DecodeConfig
from heads.device import has_timed_events, synchronize, timed_event
from heads.frozen.loading import Target
from heads.frozen.media import MediaPrompt
from heads.sampling.draws import request_number

# context: the target's context is full;
# non_finite: target or draft computed NaN or infinity; error: decoding raised, e.g. out of memory;
# no_room_in_context: a later turn with all before it, or one before that, does not fit; after_a_failed_turn: a turn before it
# has no answer.
StopReason = Literal["eos", "length", "context", "non_finite", "error", "no_room_in_context", "after_a_failed_turn"]
UNDECODED = frozenset(("error", "no_room_in_context", "after_a_failed_turn"))  # such a generation has no tokens
FAILED = UNDECODED | {"non_finite"}
AUTOREGRESSIVE = "autoregressive"
SPECULATIVE = "speculative"
PHASES = ("prefill", "decode", "draft", "verify", "sample")  # that a clock tells apart
WITH_LOOKUP = "with_lookup"  # speculative decoding by suffix lookup or else by the same draft, round by round
OTHER_RULE = "other_verification"  # by the same draft, whose drafts are drawn in place of its likeliest, or the reverse

RECORDS = "records.jsonl"
BATCHES = ".batches-"  # then the job: a folder of one file for each finished batch
# Rounds are stored as columns, without what was not measured; their committed tokens are slices of the answer.
# The columns beside the number of committed tokens, each with the value that is left out where all rounds have it.
USUAL: dict[str, Any] = {
    "drafted": (),
    "num_accepted": 0,
    "overlap": None,
    "uncovered": None,
    "ranks": None,
    "num_nodes": None,
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue. `prompt_id` and `turn` seed its random numbers, so it gets the same tokens in any batch."""

    prompt_id: str
    category: str
    tokens: tuple[int, ...]
    turn: int = 0
    suite: str = ""
    media_prompt: MediaPrompt | None = None  # of a prompt with images or sounds; `tokens` has their places

    @property
    def number(self) -> int:
        """A 63-bit hash of its name, the same in every process."""
        return request_number(f"{self.prompt_id}/{self.turn}" if self.turn else self.prompt_id)

    def answered(
        self, mode: str, stop_reason: StopReason, tokens: tuple[int, ...] = (), rounds: tuple[Round, ...] = ()
    ) -> Generation:
        """Return the record of an answer to it; without tokens of one that was not decoded."""
        return Generation(
            prompt_id=self.prompt_id,
            category=self.category,
            mode=mode,
            prompt_tokens=self.tokens,
            tokens=tokens,
            rounds=rounds,
            stop_reason=stop_reason,
            turn=self.turn,
            suite=self.suite,
            media_prompt=self.media_prompt,
        )


@dataclass(frozen=True, kw_only=True)
class Round:
    """One target step.

    Where the end of the text cut the round, `num_accepted` is cut as well, and the last committed token may then be an
    accepted one instead of the target's own. Of a tree, `drafted` is one path (the accepted drafts and the likeliest branch
    below them), so that positions mean what they mean for a chain.
    """

    drafted: tuple[int, ...]
    num_accepted: int
    committed: tuple[int, ...]
    # The chance that a draft is kept, at each drafted position up to and with the first rejected one: of one that was drawn
    # sum_v min(p, q) = 1 - TV(p, q) (2211.17192, corollary 3.6), of a likeliest token its p (`compare_distributions`)
    overlap: tuple[float, ...] | None = None
    uncovered: tuple[float, ...] | None = None  # the mass of p outside the draft's vocabulary, at the same positions
    ranks: tuple[int, ...] | None = None  # of a tree: which child of its parent each accepted draft is, 0 the likeliest
    num_nodes: int | None = None  # of a tree: all its drafts

    @property
    def num_drafted(self) -> int:
        """How many drafts the target verified."""
        return len(self.drafted) if self.num_nodes is None else self.num_nodes


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One prompt's continuation. `tokens[0]` came from the prompt's own forward (prefill), the rest from the rounds."""

    prompt_id: str
    category: str
    mode: str  # autoregressive | speculative | the name of a baseline such as prompt_lookup
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    stop_reason: StopReason
    turn: int = 0  # which turn of the prompt is answered; `prompt_tokens` hold the turns before and their plain answers
    suite: str = ""  # the name of the suite that the prompt is of
    media_prompt: MediaPrompt | None = None  # of a prompt with images or sounds


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Wall-clock seconds of one batch of prompts decoded together. `num_tokens` leaves out each prompt's prefill token."""

    mode: str
    repeat: int
    prompt_ids: tuple[str, ...]
    num_tokens: int
    num_rounds: int
    prefill_seconds: float
    decode_seconds: float  # everything after the prefill
    draft_seconds: float
    verify_seconds: float  # the target's forwards
    sample_seconds: float  # acceptance, residual and bonus draws
    joules: float | None = None  # spent in all, prefill included; None: not measured

    @property
    def whole_seconds(self) -> float:
        """Seconds of whole answers, prefill included."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def whole_tokens(self) -> int:
        """Tokens of whole answers, of which each has one of the prefill."""
        return self.num_tokens + len(self.prompt_ids)

    @property
    def overhead_seconds(self) -> float:
        """Decode time outside the forwards and the draws."""
        return self.decode_seconds - self.draft_seconds - self.verify_seconds - self.sample_seconds


class Clock:
    """Seconds by phase of one batch.

    At both ends of an outer phase the host waits for the device, so that the phase's work is counted in it. Phases inside it
    are timed by events queued on the device where it has them, and are counted once the outer one has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._device, self._by_events = device, has_timed_events(device)
        self._is_inside = False
        self._spans: list[tuple[str, torch.Event, torch.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside the `with` block to a phase; phases may be nested."""
        if self._is_inside and self._by_events:
            begun = timed_event(self._device)
            yield
            self._spans.append((name, begun, timed_event(self._device)))
            return
        outer, self._is_inside = self._is_inside, True
        start = self._now()
        yield
        self.seconds[name] += self._now() - start
        self._is_inside = outer
        for inner, begun, ended in self._spans:
            self.seconds[inner] += begun.elapsed_time(ended) / 1000
        self._spans.clear()

    def _now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()


# --- under way ------------------------------------------------------------------------------------------------------


@dataclass
class BatchRow:
    """The state of one request. `tokens` is prompt and answer; the last one is pending: committed, not yet in the cache."""

    request: Request
    target: Target
    config: DecodeConfig
    tokens: list[int] = field(init=False)
    rounds: list[Round] = field(default_factory=list)
    stop_reason: StopReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)

    @property
    def num_answered(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.tokens)

    @property
    def room(self) -> int:
        """How many drafts a round can use: one token of it is the target's own."""
        answer = self.config.max_new_tokens - self.num_answered
        context = self.target.max_positions - len(self.tokens)
        return max(0, min(answer, context) - 1)

    def commit(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Append tokens up to the first that ends the answer, set `stop_reason` if one does, and return them; without any the
        logits were not finite.
        """
        if not tokens:
            self.stop_reason = "non_finite"
        for place, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if token in self.target.eos_token_ids:
                self.stop_reason = "eos"
                return tokens[:place]
        if self.stop_reason is None and self.num_answered >= self.config.max_new_tokens:
            self.stop_reason = "length"
        elif self.stop_reason is None and len(self.tokens) >= self.target.max_positions:
            self.stop_reason = "context"
        return tokens

    def copied(self) -> BatchRow:
        """Return an independent copy."""
        other = BatchRow(self.request, self.target, self.config)
        other.tokens, other.rounds, other.stop_reason = list(self.tokens), list(self.rounds), self.stop_reason
        return other

    def to_generation(self, mode: str) -> Generation:
        """Return the record of an answer that has ended."""
        if self.stop_reason is None:
            raise RuntimeError(f"prompt {self.request.prompt_id} left the decoder without a reason")
        return self.request.answered(mode, self.stop_reason, tuple(self.tokens[len(self.request.tokens) :]), tuple(self.rounds))


# --- on disk --------------------------------------------------------------------------------------------------------


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

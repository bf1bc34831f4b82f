"""The records of decoding: rounds, generations, timings, and the clock that takes these. Everything measured comes from them.

The decoder makes them, `eval.metrics` and `eval.report.build` read them, and `records.jsonl` keeps them on disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from heads.device import has_timed_events, synchronize, timed_event
from heads.frozen.media import MediaPrompt

# stop: a stop string is complete; context: the target's context is full;
# non_finite: target or draft computed NaN or infinity; error: decoding raised, e.g. out of memory;
# no_room_in_context: a later turn with all before it does not fit; after_a_failed_turn: the turn before it has no answer.
StopReason = Literal["eos", "stop", "length", "context", "non_finite", "error", "no_room_in_context", "after_a_failed_turn"]
UNDECODED = frozenset(("error", "no_room_in_context", "after_a_failed_turn"))  # such a generation has no tokens
FAILED = UNDECODED | {"non_finite"}
ENDED = frozenset(("eos", "stop"))  # by what was written, not by a limit
AUTOREGRESSIVE = "autoregressive"
SPECULATIVE = "speculative"
PHASES = ("prefill", "decode", "draft", "verify", "sample", "measure")  # that a clock tells apart
WITH_LOOKUP = "with_lookup"  # speculative decoding by suffix lookup or else by the same draft, round by round


@dataclass(frozen=True)
class DistributionComparison:
    """The target's distribution p and the draft's q compared at the positions for which a round has an overlap.

    Made by `eval.decoder.verifier.compare_distributions`.
    """

    kl: tuple[float, ...]  # KL(p || q) in nats, over the tokens of the draft's vocabulary, with p renormalised there
    uncovered: tuple[float, ...]  # the mass of p outside the draft's vocabulary, where KL(p || q) would be infinite
    agrees: tuple[bool, ...]  # whether both have the same likeliest token


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
    # sum_v min(p, q) = 1 - TV(p, q) at each drafted position up to and with the first rejected one: the chance that a draft is
    # kept (2211.17192, corollary 3.6). At temperature 0 both are one-hot: 1 where the likeliest tokens agree, else 0
    overlap: tuple[float, ...] | None = None
    distributions: DistributionComparison | None = None  # more of the same comparison
    ranks: tuple[int, ...] | None = None  # of a tree: which child of its parent each accepted draft is, 0 the likeliest
    num_nodes: int | None = None  # of a tree: all its drafts

    @property
    def num_drafted(self) -> int:
        """How many drafts the target verified."""
        return len(self.drafted) if self.num_nodes is None else self.num_nodes

    @property
    def was_cut(self) -> bool:
        """Whether an accepted token ended the text, so that what was drafted behind it was never judged."""
        return len(self.committed) == self.num_accepted


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

    @property
    def num_committed(self) -> int:
        """How many tokens the rounds committed; the prefill's is not among them."""
        return sum(len(round_.committed) for round_ in self.rounds)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Wall-clock seconds of one batch of prompts decoded together. `num_tokens` leaves out each prompt's prefill token."""

    mode: str
    repeat: int
    prompt_ids: tuple[str, ...]
    num_tokens: int
    num_rounds: int
    prefill_seconds: float
    decode_seconds: float  # everything after the prefill except measuring
    draft_seconds: float
    verify_seconds: float  # the target's forwards
    sample_seconds: float  # acceptance, residual and bonus draws
    measure_seconds: float  # spent on comparing distributions; not part of decode_seconds
    decode_joules: float | None = None  # spent in decode_seconds; None: not measured

    @property
    def num_prompts(self) -> int:
        """How many answers there are, each with a token of the prefill."""
        return len(self.prompt_ids)

    @property
    def overhead_seconds(self) -> float:
        """Decode time outside the forwards and the draws."""
        return self.decode_seconds - self.draft_seconds - self.verify_seconds - self.sample_seconds


class Clock:
    """Seconds by phase of one batch; a subclass may count something else as well.

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

"""The records of decoding: rounds, generations, timings. Everything measured is computed from these.

The decoder makes them, `eval.metrics` and `eval.report.build` read them, and `records.jsonl` keeps them on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
WITH_LOOKUP = "with_prompt_lookup"  # speculative decoding by the same draft, after prompt lookup


@dataclass(frozen=True)
class DistributionComparison:
    """Target's and draft's distributions compared at the positions for which a round has an overlap.

    The fields are those of `eval.decoder.distribution_comparison.PositionComparison`, and the draft's estimate.
    """

    kl: tuple[float, ...]  # nats
    uncovered: tuple[float, ...]
    agrees: tuple[bool, ...]
    confidence: tuple[float, ...]
    target_probability: tuple[float, ...]
    distribution_confidence: tuple[float, ...] = ()  # empty in older records
    estimate: tuple[float, ...] = ()  # the draft's own of its acceptance; empty where it makes none


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
    overlap: tuple[float, ...] | None = None  # sum_v min(p, q) at each drafted position up to and with the first rejected one
    distributions: DistributionComparison | None = None  # more of the same comparison
    ranks: tuple[int, ...] | None = None  # of a tree: which child of its parent each accepted draft is, 0 the likeliest
    num_nodes: int | None = None  # of a tree: all its drafts
    by_lookup: bool = False  # of several drafts: those of this round were looked up in the text

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


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where a speculative output first differs from the plain one, and the gap between the two tokens' logits.

    `logit_gap` is how far the worse of the two tokens is from the target's best after the common prefix, computed in a wider
    dtype; `tie_tolerance` the largest gap that counts as a numerical tie, by the rounding error measured there.
    Where one output ends and the other goes on, both tokens are the longer one's, and the gap is the largest float32.
    """

    prompt_id: str
    position: int  # in tokens of the answer, from 0
    plain_token: int
    speculative_token: int
    logit_gap: float
    tie_tolerance: float
    turn: int = 0

    @property
    def is_tie(self) -> bool:
        """Whether the two tokens' logits are equal up to the rounding of the target's dtype."""
        return self.logit_gap <= self.tie_tolerance

"""A request on its way through the decoder: what is to be continued, what has been committed, and why it ended."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field

from configs.decoding import DecodeConfig
from distill.target import Target
from eval.records import Generation, Round, StopReason
from eval.stops import StopStrings


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue. `prompt_id` and `turn` name its random numbers, so it gives the same tokens in any batch."""

    prompt_id: str
    category: str
    tokens: tuple[int, ...]
    turn: int = 0

    @property
    def number(self) -> int:
        """A 63-bit number for its name, the same in every process."""
        name = f"{self.prompt_id}/{self.turn}" if self.turn else self.prompt_id
        return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


@dataclass
class Row:
    """One request under way. `tokens` is prompt and answer; the last one is pending: committed, not yet read by the target."""

    request: Request
    target: Target
    config: DecodeConfig
    tokens: list[int] = field(init=False)
    rounds: list[Round] = field(default_factory=list)
    stop_reason: StopReason | None = None
    stops: StopStrings | None = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        self.stops = StopStrings(self.target.tokenizer, self.config.stop) if self.config.stop else None

    @property
    def num_answered(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.tokens)

    @property
    def room(self) -> int:
        """How many drafts it can use: one token a round is the target's own."""
        answer = self.config.max_new_tokens - self.num_answered
        context = self.target.max_positions - len(self.tokens)
        return max(0, min(answer, context) - 1)

    def commit(self, tokens: list[int], *, finite: bool) -> list[int]:
        """Append tokens up to the first that ends the answer, and note why it ended if it did. Return what was appended."""
        if not finite:
            self.stop_reason = "non_finite"
            return []
        committed: list[int] = []
        for token in tokens:
            committed.append(token)
            self.stop_reason = self._ended_by(token)
            if self.stop_reason is not None:
                break
        self.tokens += committed
        if self.stop_reason is None and self.num_answered >= self.config.max_new_tokens:
            self.stop_reason = "length"
        elif self.stop_reason is None and len(self.tokens) >= self.target.max_positions:
            self.stop_reason = "context"
        return committed

    def copied(self) -> Row:
        """Return another that goes on from here by itself."""
        other = Row(self.request, self.target, self.config)
        other.tokens, other.rounds, other.stop_reason = list(self.tokens), list(self.rounds), self.stop_reason
        other.stops = copy.deepcopy(self.stops, {id(self.target.tokenizer): self.target.tokenizer})
        return other

    def _ended_by(self, token: int) -> StopReason | None:
        """Return why the answer ends with this token, its next; None: it does not."""
        if token in self.target.eos_token_ids:
            return "eos"
        return "stop" if self.stops is not None and self.stops.completes(token) else None

    def to_generation(self, mode: str) -> Generation:
        """Return its record.

        Raises:
            RuntimeError: it has not ended.
        """
        if self.stop_reason is None:
            raise RuntimeError(f"prompt {self.request.prompt_id} left the decoder without a reason")
        return Generation(
            prompt_id=self.request.prompt_id,
            category=self.request.category,
            mode=mode,
            prompt_tokens=self.request.tokens,
            tokens=tuple(self.tokens[len(self.request.tokens) :]),
            rounds=tuple(self.rounds),
            stop_reason=self.stop_reason,
            turn=self.request.turn,
        )

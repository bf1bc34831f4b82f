"""A request in the decoder: what is to be continued, what has been committed, and why it ended."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from configs.schema.decoding import DecodeConfig
from eval.decoder.records import Generation, Round, StopReason
from heads.frozen.loading import Target
from heads.frozen.media import MediaPrompt
from heads.sampling.draws import request_number

MARGIN = 8  # characters of a tail before those that may belong to a stop string


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


@dataclass
class BatchRow:
    """The state of one request. `tokens` is prompt and answer; the last one is pending: committed, not yet in the cache."""

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
            elif self.stops is not None and self.stops.completes(token):
                self.stop_reason = "stop"
            if self.stop_reason is not None:
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
        other.stops = copy.deepcopy(self.stops, {id(self.target.tokenizer): self.target.tokenizer})
        return other

    def to_generation(self, mode: str) -> Generation:
        """Return the record of an answer that has ended."""
        if self.stop_reason is None:
            raise RuntimeError(f"prompt {self.request.prompt_id} left the decoder without a reason")
        answer = tuple(self.tokens[len(self.request.tokens) :])
        return Generation(
            prompt_id=self.request.prompt_id,
            category=self.request.category,
            mode=mode,
            prompt_tokens=self.request.tokens,
            tokens=answer,
            rounds=tuple(self.rounds),
            stop_reason=self.stop_reason,
            turn=self.request.turn,
            suite=self.request.suite,
            media_prompt=self.request.media_prompt,
        )


class StopStrings:
    """The search for stop strings in one answer, token by token: where it ends does not depend on the rounds.

    Only a tail of the text is decoded, long enough for the longest string and for what tokenizers do differently at the
    beginning of a text: drop a space, or show the rest of a character whose first bytes lie before it. An incomplete character
    decodes to U+FFFD, which no stop string may hold (`configs.schema.decoding.DecodeConfig`). Special tokens count as their
    text. A string that begins in the prompt is not found.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self._enough = max(map(len, stops)) + MARGIN
        self._tail: list[int] = []  # the last tokens of the answer, all of it while that is short
        self._kept = self._enough  # how many of them stay when there are twice as many

    def completes(self, token: int) -> bool:
        """Add the answer's next token; return whether the text then holds one of the strings."""
        self._tail.append(token)
        text = self._text(self._tail)
        if any(stop in text for stop in self.stops):
            return True
        if len(self._tail) > 2 * self._kept:
            # Drop the front, unless too little text would stay: tokens may decode to no text at all.
            shorter = self._tail[-self._kept :]
            if len(self._text(shorter)) >= self._enough:
                self._tail = shorter
            else:
                self._kept = len(self._tail)
        return False

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

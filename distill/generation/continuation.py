"""The one loop that writes text: rows of token ids are continued until each has ended.

Answers, self-seeded prompts and on-policy rows all come from `continue_rows`. A `TokenSource` draws the tokens: the target, one
a step (`TargetSource`), or the draft, several a step (`distill.student.on_policy`), by the distribution, random streams and
cache of the decoder. transformers' `generate` is not used: it fills open settings from the checkpoint's generation config.
B batch, T positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from configs.runtime.errors import RunFailed
from configs.runtime.terminal import Tokens
from configs.schema.decoding import SamplingConfig
from heads.frozen.loading import Target
from heads.frozen.media import MediaPrompt
from heads.inference.causal_lm import forward_rows, head_logits, new_cache
from heads.inference.kv_cache import RowCache
from heads.inference.model_checks import check_rolls_back
from heads.sampling.counter_rng import CounterRNG, Role
from heads.sampling.probabilities import draw, greedy_token, token_probabilities

T = TypeVar("T")


@dataclass(kw_only=True)
class TokenRow:
    """A sequence of token ids to be continued."""

    key: int  # the caller's number for it
    prompt_ids: Sequence[int]  # its first tokens, at least one
    limit: int  # its greatest number of tokens, those of the prompt included; more than the prompt has
    request: int  # names its random numbers (`heads.sampling.counter_rng`), which depend on nothing else but the seed
    media_prompt: MediaPrompt | None = None
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def written(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.prompt_ids) :]


class TokenSource(Protocol):
    """A model that draws the next tokens of a batch of rows."""

    device: torch.device  # where it draws

    def start(self, rows: Sequence[TokenRow]) -> None:
        """Read the prompts of a new batch."""

    def draw(self, rows: Sequence[TokenRow], rng: CounterRNG) -> list[list[int]]:
        """Return each row's next tokens, at least one; those after the row's end are ignored."""

    def keep_rows(self, places: Sequence[int]) -> None:
        """Drop all rows of the batch but these, in this order."""

    def has_room(self, row: TokenRow) -> bool:
        """Return whether a row can take the place of one that has ended."""
        return False

    def put_rows(self, places: Sequence[int], rows: Sequence[TokenRow]) -> None:
        """Read the prompts of rows that have room, each of which takes the place of one that has ended."""
        return


@torch.inference_mode()
def continue_rows(
    source: TokenSource,
    rows: Iterable[TokenRow],
    *,
    seed: int,
    has_ended: Callable[[TokenRow], bool],
    batch_size: int | None = None,
    on_step: Callable[[int], None] = lambda count: None,
) -> Iterator[TokenRow]:
    """Continue rows, `batch_size` at a time (None: all at once), and yield each as it ends, at its limit at the latest.

    Another one, asked for only after a row that has ended was yielded, takes its place where the source has room for it; where
    it has none, a new batch is begun. `on_step` gets the number of tokens that each step has added to the rows.
    """
    waiting = iter(rows)
    held: list[TokenRow] = []  # that the batch under way has no room for
    while active := [*held, *islice(waiting, None if batch_size is None else batch_size - len(held))]:
        held.clear()
        rng = CounterRNG(seed, [row.request for row in active], source.device)
        source.start(active)
        while active:
            active = yield from _step(source, active, rng, waiting, held, has_ended, on_step)


def _step(
    source: TokenSource,
    active: list[TokenRow],
    rng: CounterRNG,
    waiting: Iterator[TokenRow],
    held: list[TokenRow],
    has_ended: Callable[[TokenRow], bool],
    on_step: Callable[[int], None],
) -> Generator[TokenRow, None, list[TokenRow]]:
    """Draw once for the active rows, yield those that end, and return the rows that are active after it."""
    before = sum(len(row.tokens) for row in active)
    drawn = source.draw(active, rng)
    ended = [_append(row, tokens, has_ended) for row, tokens in zip(active, drawn, strict=True)]
    on_step(sum(len(row.tokens) for row in active) - before)
    kept, new = [], []
    for place, row in enumerate(active):
        if not ended[place]:
            kept.append(place)
            continue
        yield row
        successor = None if held else next(waiting, None)
        if successor is not None and source.has_room(successor):
            active[place] = successor
            rng.replace(place, successor.request)
            kept.append(place)
            new.append(place)
        elif successor is not None:
            held.append(successor)
    if new:
        source.put_rows(new, [active[place] for place in new])
    if 0 < len(kept) < len(active):
        source.keep_rows(kept)
        rng.keep_rows(kept)
    return [active[place] for place in kept]


class TargetSource(TokenSource):
    """Draws tokens from the target; its cache has `capacity` positions a row, and as many as the first rows may take."""

    def __init__(self, target: Target, sampling: SamplingConfig, *, capacity: int = 0) -> None:
        check_rolls_back(target.model)
        self.target, self.sampling, self.capacity = target, sampling, capacity
        self.device = target.device
        self._cache: RowCache
        self._prompts: list[Sequence[int] | None] = []  # whose keys and values each place holds; None: of one with media
        self._hidden_BD: Tensor | None = None  # of the prompts' last tokens, where they have been read

    def start(self, rows: Sequence[TokenRow]) -> None:
        self._cache = new_cache(self.target.model, max(self.capacity, *(row.limit for row in rows)))
        self._prompts = list(map(_text_of, rows))
        lengths_B = torch.tensor([len(row.tokens) for row in rows], device=self.device)
        hidden_BTD = self._read_prompts(self._cache, [row.tokens for row in rows], rows)
        self._hidden_BD = hidden_BTD[torch.arange(len(rows), device=self.device), lengths_B - 1]

    def draw(self, rows: Sequence[TokenRow], rng: CounterRNG) -> list[list[int]]:
        """Return each row's next token: the greedy choice, or a draw by the row's own random number for that position."""
        hidden_BD, self._hidden_BD = self._hidden_BD, None
        if hidden_BD is None:
            ids_B1 = torch.tensor([row.tokens[-1:] for row in rows], device=self.device)
            hidden_BD = forward_rows(self.target.model, self._cache, ids_B1, [len(row.tokens) - 1 for row in rows])[:, 0]
        logits_BV = head_logits(self.target.model, hidden_BD)
        if not bool(torch.isfinite(logits_BV.amax())):
            dtype = self.target.model.dtype
            raise RunFailed(f"the target's logits are not finite in {dtype}; try another target.dtype")
        if self.sampling.temperature == 0:
            return greedy_token(logits_BV).unsqueeze(1).tolist()
        uniform_B = rng.along(Role.TARGET, [len(row.tokens) for row in rows], 1).squeeze(1)
        return draw(token_probabilities(logits_BV, self.sampling), uniform_B).unsqueeze(1).tolist()

    def keep_rows(self, places: Sequence[int]) -> None:
        self._cache.keep_rows(places)
        self._prompts = [self._prompts[place] for place in places]

    def has_room(self, row: TokenRow) -> bool:
        return self._cache.takes_rows and row.limit <= self._cache.capacity

    def put_rows(self, places: Sequence[int], rows: Sequence[TokenRow]) -> None:
        # All but the last token, which the next draw reads with those of the other rows; where a place holds that already, as
        # with self-seeded turns of one beginning, nothing is read.
        texts = list(map(_text_of, rows))
        others = [n for n, place in enumerate(places) if texts[n] is None or texts[n] != self._prompts[place]]
        for n in others:
            self._prompts[places[n]] = texts[n]
        prompts = [rows[n].tokens[:-1] for n in others]
        if not any(prompts):
            return
        read = new_cache(self.target.model, max(map(len, prompts)))
        self._read_prompts(read, prompts, [rows[n] for n in others])
        self._cache.put_rows([places[n] for n in others], read)

    def _read_prompts(self, cache: RowCache, prompts: Sequence[Sequence[int]], rows: Sequence[TokenRow]) -> Tensor:
        """Put prompts into a cache, and return the hidden states `[B, T, D]`."""
        longest = max(map(len, prompts))
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        media = self.target.media_inputs([row.media_prompt for row in rows], prompts)
        ids_BT = torch.tensor(padded, device=self.device)
        return forward_rows(self.target.model, cache, ids_BT, [0] * len(prompts), media=media)


def _text_of(row: TokenRow) -> Sequence[int] | None:
    """Return a row's prompt; None for one with media, which its token ids do not tell."""
    return None if row.media_prompt is not None else row.prompt_ids


class Ask(NamedTuple):
    """What a text waits for: the continuation of these tokens, at least one, by at most `limit`."""

    ids: Sequence[int]
    limit: int
    request: int  # names the random numbers
    media_prompt: MediaPrompt | None = None
    has_ended: Callable[[TokenRow], bool] | None = None  # None: an answer's end


class Rows(Iterator[TokenRow], Generic[T]):
    """Rows for what texts ask for; after the last one there may be more."""

    def __init__(self, texts: Iterable[Generator[Ask, Any, T]], longest: int) -> None:
        self.new, self.longest, self.numbers = iter(texts), longest, count()
        self.waiting = deque[tuple[Generator[Ask, Any, T], Any]]()  # texts that got their tokens
        self.asked: dict[int, tuple[Generator[Ask, Any, T], Ask]] = {}
        self.over = deque[T]()  # what texts returned

    def __next__(self) -> TokenRow:
        while True:
            text, got = self.waiting.popleft() if self.waiting else (next(self.new, None), None)
            if text is None:
                raise StopIteration
            try:
                ask = text.send(got)
            except StopIteration as end:
                self.over.append(end.value)
                continue
            self.asked[number := next(self.numbers)] = text, ask
            limit = min(self.longest, len(ask.ids) + ask.limit)
            return TokenRow(key=number, prompt_ids=ask.ids, limit=limit, request=ask.request, media_prompt=ask.media_prompt)


def continue_texts(
    target: Target,
    sampling: SamplingConfig,
    texts: Iterable[Generator[Ask, Any, T]],
    *,
    seed: int,
    batch_size: int,
    capacity: int = 0,
    tokens: Tokens | None = None,
) -> Iterator[T]:
    """Let the target continue what each text asks for, until it has got all; yield what each returns.

    As one gets its tokens, it or a new one takes the place in the batch. Rows of up to `capacity` positions fit into it.
    """
    tokens, rows = tokens or Tokens(), Rows(texts, target.max_positions)

    def has_ended(row: TokenRow) -> bool:
        own = rows.asked[row.key][1].has_ended
        return row.tokens[-1] in target.eos_token_ids if own is None else own(row)

    source = TargetSource(target, sampling, capacity=capacity)
    for row in continue_rows(source, rows, seed=seed, has_ended=has_ended, batch_size=batch_size, on_step=tokens.write):
        text, ask = rows.asked.pop(row.key)
        tokens.end(ask.limit, len(row.written))
        rows.waiting.append((text, row.written))
        while rows.over:
            yield rows.over.popleft()
    yield from rows.over


def up_to_end(ids: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """Return token ids up to and including the first that ends an answer."""
    end = next((place for place, token in enumerate(ids) if token in end_ids), len(ids))
    return list(ids[: end + 1])


def _append(row: TokenRow, tokens: Sequence[int], has_ended: Callable[[TokenRow], bool]) -> bool:
    """Append tokens up to the row's end; return whether it has ended."""
    for token in tokens:
        row.tokens.append(token)
        if len(row.tokens) >= row.limit or has_ended(row):
            return True
    return False

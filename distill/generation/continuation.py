"""The one loop that writes text: token ids are continued in the slots of a batch until each text has ended.

Answers, self-seeded prompts and on-policy rows all come from `continue_requests`. A `TokenSource` draws the tokens: the target,
one a step (`TargetSource`), or the draft, several a step (`distill.student.on_policy`), by the distribution, random streams and
cache of the decoder. transformers' `generate` is not used: it fills open settings from the checkpoint's generation config.
B batch, T positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from configs.runtime.errors import RunFailed
from configs.schema.decoding import SamplingConfig
from heads.frozen.loading import Target
from heads.frozen.media import MediaPrompt
from heads.inference.causal_lm import forward_rows, head_logits, new_cache
from heads.inference.kv_cache import RowCache
from heads.inference.model_checks import check_rolls_back
from heads.sampling.draws import CounterRNG, Role, draw, greedy_token, token_probabilities


@dataclass(kw_only=True, eq=False)
class Request:
    """Token ids to be continued."""

    prompt_ids: Sequence[int]  # its first tokens, at least one
    limit: int  # its greatest number of tokens, those of the prompt included; more than the prompt has
    number: int  # names its random numbers (`heads.sampling.draws`), which depend on nothing else but the seed
    has_ended: Callable[[Request], bool]  # asked after each token
    # Gets what was written; what is asked next, if anything
    on_done: Callable[[list[int]], Request | None] = lambda written: None
    media_prompt: MediaPrompt | None = None
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def written(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]

    def append(self, tokens: Sequence[int]) -> bool:
        """Append tokens up to the text's end; return whether it has ended."""
        for token in tokens:
            self.tokens.append(token)
            if len(self.tokens) >= self.limit or self.has_ended(self):
                return True
        return False


class TokenSource(Protocol):
    """A model that draws the next tokens of a batch of requests, one in each slot."""

    device: torch.device  # where it draws

    def start(self, slots: Sequence[Request]) -> None:
        """Read the prompts of a new batch."""

    def draw(self, slots: Sequence[Request], rng: CounterRNG) -> list[list[int]]:
        """Return each one's next tokens, at least one; those after its end are ignored."""

    def keep_rows(self, places: Sequence[int]) -> None:
        """Drop all slots but these, in this order."""

    def has_room(self, request: Request) -> bool:
        """Return whether a request can take the slot of one that has ended."""
        return False

    def put_rows(self, places: Sequence[int], requests: Sequence[Request]) -> None:
        """Read the prompts of requests that have room, each of which takes the slot of one that has ended."""
        return


@torch.inference_mode()
def continue_requests(source: TokenSource, requests: Iterable[Request], *, seed: int, batch_size: int | None = None) -> None:
    """Continue all requests and those that their `on_done` returns, `batch_size` at a time (None: all at once).

    As one ends, what it asks next or the next request takes its slot where the source has room for it; where it has none, a new
    batch is begun.
    """
    new, further = iter(requests), deque[Request]()

    def take() -> Request | None:
        return further.popleft() if further else next(new, None)

    def take_fitting() -> Request | None:
        following = take()
        if following is None or source.has_room(following):
            return following
        further.appendleft(following)
        return None

    while slots := list(islice(iter(take, None), batch_size)):
        rng = CounterRNG(seed, [each.number for each in slots], source.device)
        source.start(slots)
        while slots:
            drawn = zip(slots, source.draw(slots, rng), strict=True)
            ended = [place for place, (each, tokens) in enumerate(drawn) if each.append(tokens)]
            filled = list[int]()
            for place in ended:
                asked = slots[place].on_done(slots[place].written)
                further.extend([] if asked is None else [asked])
                if (following := take_fitting()) is not None:
                    slots[place] = following
                    rng.replace(place, following.number)
                    filled.append(place)
            if filled:
                source.put_rows(filled, [slots[place] for place in filled])
            kept = [place for place in range(len(slots)) if place not in ended or place in filled]
            if 0 < len(kept) < len(slots):
                source.keep_rows(kept)
                rng.keep_rows(kept)
            slots = [slots[place] for place in kept]


class TargetSource(TokenSource):
    """Draws tokens from the target; its cache has `capacity` positions a row, and as many as the first rows may take."""

    def __init__(self, target: Target, sampling: SamplingConfig, *, capacity: int = 0) -> None:
        check_rolls_back(target.model)
        self.target, self.sampling, self.capacity = target, sampling, capacity
        self.device = target.device
        self._cache: RowCache
        self._prompts: list[Sequence[int] | None] = []  # whose keys and values each slot holds; None: of one with media
        self._hidden_BD: Tensor | None = None  # of the prompts' last tokens, where they have been read

    def start(self, slots: Sequence[Request]) -> None:
        self._cache = new_cache(self.target.model, max(self.capacity, *(each.limit for each in slots)))
        self._prompts = list(map(_text_of, slots))
        lengths_B = torch.tensor([len(each.tokens) for each in slots], device=self.device)
        hidden_BTD = self._read_prompts(self._cache, [each.tokens for each in slots], slots)
        self._hidden_BD = hidden_BTD[torch.arange(len(slots), device=self.device), lengths_B - 1]

    def draw(self, slots: Sequence[Request], rng: CounterRNG) -> list[list[int]]:
        """Return each one's next token: the greedy choice, or a draw by its own random number for that position."""
        hidden_BD, self._hidden_BD = self._hidden_BD, None
        if hidden_BD is None:
            ids_B1 = torch.tensor([each.tokens[-1:] for each in slots], device=self.device)
            hidden_BD = forward_rows(self.target.model, self._cache, ids_B1, [len(each.tokens) - 1 for each in slots])[:, 0]
        logits_BV = head_logits(self.target.model, hidden_BD)
        if not bool(torch.isfinite(logits_BV.amax())):
            dtype = self.target.model.dtype
            raise RunFailed(f"the target's logits are not finite in {dtype}; try another target.dtype")
        if self.sampling.temperature == 0:
            return greedy_token(logits_BV).unsqueeze(1).tolist()
        uniform_B = rng.along(Role.TARGET, [len(each.tokens) for each in slots], 1).squeeze(1)
        return draw(token_probabilities(logits_BV, self.sampling), uniform_B).unsqueeze(1).tolist()

    def keep_rows(self, places: Sequence[int]) -> None:
        self._cache.keep_rows(places)
        self._prompts = [self._prompts[place] for place in places]

    def has_room(self, request: Request) -> bool:
        return self._cache.takes_rows and request.limit <= self._cache.capacity

    def put_rows(self, places: Sequence[int], requests: Sequence[Request]) -> None:
        # All but the last token, which the next draw reads with those of the other rows; where a slot holds that already, as
        # with self-seeded turns of one beginning, nothing is read.
        texts = list(map(_text_of, requests))
        others = [n for n, place in enumerate(places) if texts[n] is None or texts[n] != self._prompts[place]]
        for n in others:
            self._prompts[places[n]] = texts[n]
        prompts = [requests[n].tokens[:-1] for n in others]
        if not any(prompts):
            return
        read = new_cache(self.target.model, max(map(len, prompts)))
        self._read_prompts(read, prompts, [requests[n] for n in others])
        self._cache.put_rows([places[n] for n in others], read)

    def _read_prompts(self, cache: RowCache, prompts: Sequence[Sequence[int]], requests: Sequence[Request]) -> Tensor:
        longest = max(map(len, prompts))
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        media = self.target.media_inputs([each.media_prompt for each in requests], prompts)
        ids_BT = torch.tensor(padded, device=self.device)
        return forward_rows(self.target.model, cache, ids_BT, [0] * len(prompts), media=media)


def _text_of(request: Request) -> Sequence[int] | None:
    """Return the prompt; None for one with media, which its token ids do not tell."""
    return None if request.media_prompt is not None else request.prompt_ids


def up_to_end(ids: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """Return token ids up to and including the first that ends an answer."""
    end = next((place for place, token in enumerate(ids) if token in end_ids), len(ids))
    return list(ids[: end + 1])

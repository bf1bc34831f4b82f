"""What suffix lookup counts, mixed into a draft's own distributions.

A draft and the counts are right in different places: the draft knows what a text means, the counts know what followed the very
words. Drafts are chosen, or drawn, from q = (1 - s c) p + s n, where p is the draft's distribution, n what the suffixes of the
text say of some tokens, c the sum of that, and s `SHARE`. As q is what verification gets, the output's distribution stays. The
counts know tokens too that the draft's vocabulary lacks.
B batch, M tokens of a row that are continued, W draft vocabulary, V target vocabulary, C counted tokens that W lacks; `...` any
leading dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from heads.proposers.suffixes import SuffixText
from heads.vocabulary import DraftVocabulary, over_target, target_ids

SHARE = 0.3  # of the counts, best of tenths for an EAGLE-3 head on prompts that no benchmark decodes


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Logits over a draft's vocabulary and, behind it, over tokens that were counted and that it lacks."""

    logits: Tensor  # [..., W + C]
    vocabulary: DraftVocabulary | None
    others: Tensor | None = None  # [..., C], the ids of the last C, any where the logit is -inf; None: there are none

    def target_ids(self, chosen: Tensor) -> Tensor:
        """Return the target's ids of choices `[...]` or `[..., K]`."""
        if self.others is None:
            return target_ids(self.vocabulary, chosen)
        W = self.logits.shape[-1] - self.others.shape[-1]
        others = self.others.gather(-1, (chosen.view(*self.others.shape[:-1], -1) - W).clamp(min=0)).view_as(chosen)
        return torch.where(chosen < W, target_ids(self.vocabulary, chosen.clamp(max=W - 1)), others)

    def over_target(self, values: Tensor, fill: float) -> Tensor:
        """Return values `[..., W + C]` at the ids of their tokens, `[..., V]`, with `fill`, the least of them, elsewhere."""
        if self.others is None:
            return over_target(self.vocabulary, values, fill)
        own, others = values.split([values.shape[-1] - self.others.shape[-1], self.others.shape[-1]], -1)
        return over_target(self.vocabulary, own, fill).scatter_reduce(-1, self.others, others, "amax")


def mixed(
    logits: Tensor, vocabulary: DraftVocabulary | None, counted: CountedTexts | None, temperature: float, num_continued: int = 1
) -> Mixture:
    """Return the mixture of a draft's logits `[B, W]`, or `[B, M, W]` with M 1 or `num_continued`, and counts, if any.

    Both are taken at a temperature, 0 as 1.
    """
    if counted is None:
        return Mixture(logits=logits, vocabulary=vocabulary)
    if logits.ndim == 3:
        return counted.mix(logits.expand(-1, num_continued, -1), vocabulary, temperature)
    found = counted.mix(logits.unsqueeze(1), vocabulary, temperature)
    return replace(found, logits=found.logits[:, 0], others=None if found.others is None else found.others[:, 0])


class CountedTexts:
    """What is counted of each next token in a round; every text was read to its end. Begins at the ends of the texts."""

    def __init__(self, texts: Sequence[SuffixText]) -> None:
        self._texts = texts
        self._places = [[text.end()] for text in texts]  # of the M tokens of each row

    def mix(self, logits_BMW: Tensor, vocabulary: DraftVocabulary | None, temperature: float) -> Mixture:
        """Mix the counts into the distributions after M tokens of each row, as `mixed` says."""
        T, known = temperature or 1.0, None if vocabulary is None else _places_of(vocabulary.token_ids_W)
        probs_BMW = (logits_BMW.float() / T).softmax(-1)
        inside: list[dict[int, float]] = []
        outside: list[dict[int, float]] = []
        for text, places in zip(self._texts, self._places, strict=True):
            for counted in map(text.probabilities, places):
                pairs = [(token if known is None else known.get(token, -1), token, SHARE * q) for token, q in counted.items()]
                inside.append({place: share for place, _, share in pairs if place >= 0})
                outside.append({token: share for place, token, share in pairs if place < 0})
        left = [1 - sum(chain(own.values(), others.values())) for own, others in zip(inside, outside, strict=True)]
        shape, device = probs_BMW.shape[:2], probs_BMW.device
        mixed_BMX = probs_BMW * torch.tensor(left, device=device).view(*shape, 1)
        mixed_BMX.scatter_add_(-1, *_filled(inside, shape, device))
        others_BMC, shares_BMC = _filled(outside, shape, device)
        if not others_BMC.shape[-1]:
            return Mixture(logits=mixed_BMX.log() * T, vocabulary=vocabulary)
        logits_BMX = torch.cat([mixed_BMX, shares_BMC], -1).log() * T
        return Mixture(logits=logits_BMX, vocabulary=vocabulary, others=others_BMC)

    def follow(self, tokens_BM: Tensor, origins_BM: Tensor) -> None:
        """Go on with drafted tokens, each after the one of the M before that it continues."""
        followed = torch.stack([tokens_BM, origins_BM], -1).tolist()  # in one transfer
        rows = zip(self._texts, self._places, followed, strict=True)
        self._places = [[text.after(places[origin], token) for token, origin in pairs] for text, places, pairs in rows]


def _filled(rows: Sequence[dict[int, float]], shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return keys and values as `[*shape, C]`, filled up with zeros."""
    width = max(map(len, rows))
    keys = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64, device=device)
    values = torch.tensor([[*row.values(), *[0.0] * (width - len(row))] for row in rows], dtype=torch.float32, device=device)
    return keys.view(*shape, width), values.view(*shape, width)


@lru_cache(maxsize=8)
def _places_of(token_ids_W: Tensor) -> dict[int, int]:
    """Return where each of the target's ids stands in a draft's vocabulary."""
    return {token: place for place, token in enumerate(token_ids_W.tolist())}


_BESIDE: ContextVar[CountedTexts | None] = ContextVar("counted", default=None)


@contextmanager
def beside(counted: CountedTexts) -> Iterator[None]:
    """Have the chains and trees that a draft builds in here mixed with counts."""
    token = _BESIDE.set(counted)
    try:
        yield
    finally:
        _BESIDE.reset(token)


def counted_here() -> CountedTexts | None:
    """Return the counts that `beside` has set."""
    return _BESIDE.get()

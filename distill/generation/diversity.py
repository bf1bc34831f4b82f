"""How varied a data set is: near-duplicate prompts, and the spread of prompts and answers for the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from distill.dataset.conversations import Conversation
from distill.generation.prompts import word_grams

NEAR = 0.5  # of the 4-grams that either of two prompts has
GRAM_WORDS = 4
MOST_MEASURED = 20_000  # conversations, the first ones
PERCENTILES = (10, 50, 90, 100)


class NearDuplicates:
    """Prompts so far, by their runs of four words; those of fewer words are near to none."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._having: dict[tuple[str, ...], list[int]] = {}

    def add(self, text: str) -> bool:
        """Add a prompt, unless one so far shares `NEAR` of its runs; return whether it was added."""
        grams = set(word_grams(text, GRAM_WORDS))
        shared = Counter(place for gram in grams for place in self._having.get(gram, ()))
        if any(count >= NEAR * (len(grams) + self._sizes[place] - count) for place, count in shared.items()):
            return False
        for gram in grams:
            self._having.setdefault(gram, []).append(len(self._sizes))
        self._sizes.append(len(grams))
        return True


def measure_spread(conversations: Sequence[Conversation], vocab_size: int) -> dict[str, Any]:
    """Return how varied prompts and answers are, as JSON values.

    `distinct_n` is the share of different runs of n among all, of words in what users say and of tokens in answers. It falls
    as a data set grows, so only sets of equal size compare.
    """
    rows = conversations[:MOST_MEASURED]
    texts = {row.prompt_id: row.user_text for row in rows}  # rows of a prompt follow its turns: the last one has all of them
    answers = [row.answer_ids for row in rows]
    return {
        "measured_on": {"prompts": len(texts), "conversations": len(rows)},
        "prompts": {
            **{f"distinct_{n}": _distinct(word_grams(text, n) for text in texts.values()) for n in (1, 2, 4)},
            "tokens": _percentiles([len(row.prompt_ids) for row in rows]),
        },
        "answers": {
            **{
                f"distinct_{n}": _distinct(zip(*(ids[at:] for at in range(n)), strict=False) for ids in answers)
                for n in (1, 2, 4)
            },
            "tokens": _percentiles([len(ids) for ids in answers]),
            "vocabulary_share": len({token for ids in answers for token in ids}) / vocab_size,
        },
    }


def _distinct(texts: Iterable[Iterator[Hashable]]) -> float:
    runs = [hash(run) for text in texts for run in text]
    return len(set(runs)) / max(1, len(runs))


def _percentiles(lengths: Sequence[int]) -> dict[str, int]:
    values = np.percentile(lengths, PERCENTILES, method="lower").tolist()
    return {f"p{percent}": int(value) for percent, value in zip(PERCENTILES, values, strict=True)}

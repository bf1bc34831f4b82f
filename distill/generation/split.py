"""The split of prompts into a training and a held-out side, and near-duplicates among prompts.

The split goes by a hash of the text alone, so a prompt stays on its side when prompts are added, removed or reordered, and a
draft trained earlier has never seen what a later split holds out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from configs.runtime.errors import InputError
from distill.dataset.conversations import media_names, text_hash
from distill.generation.prompts import DUPLICATE, Prompt, everything_said

# Of the GPT-3 report (2005.14165, appendix C): the length of overlap that counts as contamination, and in how many texts to
# train on it may stand before it is taken for a phrase that many share, such as the instructions of a template.
GUARD_WORDS, MAX_SHARING = 13, 10
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana and Chinese characters
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
OVERLAP = "overlaps_held_out"
NEAR_SHARE, NEAR_WORDS = 0.5, 4  # near-duplicates share this part of the runs of so many words that either has


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which prompts are trained on, in the order given, which are held out, and how many were dropped, by reason.

    Held-out prompts are in the order of the hash that splits them, so that the first are a sample of all sources.
    """

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    dropped: dict[str, int]


def split_prompts(prompts: Sequence[Prompt], held_out_share: float) -> Split:
    """Drop duplicates, split by `split_positions`, and drop from train what overlaps a held-out prompt.

    An overlap is a whole turn, all words, or 13 of them in a row, unless these stand in more than `MAX_SHARING` prompts that
    would be trained on.
    """
    distinct = without_duplicates(prompts)
    placed = list(zip(distinct, split_positions(distinct), strict=True))
    held_out = [prompt for prompt, position in sorted(placed, key=itemgetter(1)) if position < held_out_share]
    candidates = [prompt for prompt, position in placed if position >= held_out_share]
    known = {gram for prompt in held_out for gram in _guarded(prompt)}
    sharing = Counter(gram for prompt in candidates for gram in known.intersection(_guarded(prompt)))
    known -= {gram for gram, count in sharing.items() if len(gram) == GUARD_WORDS and count > MAX_SHARING}
    asked = {text_hash(text) for prompt in held_out for text in prompt.user_texts}
    train = [
        prompt
        for prompt in candidates
        if known.isdisjoint(_guarded(prompt)) and asked.isdisjoint(map(text_hash, prompt.user_texts))
    ]
    dropped = {DUPLICATE: len(prompts) - len(distinct), OVERLAP: len(candidates) - len(train)}
    if not train or not held_out:
        raise InputError(
            f"the split leaves {len(train)} prompts to train on and {len(held_out)} held out of {len(prompts)} (dropped: "
            f"{dropped[DUPLICATE]} duplicates, {dropped[OVERLAP]} that overlap a held-out one); both need at least one: "
            f"change held_out_share, which is {held_out_share}, or give more prompts"
        )
    return Split(train=tuple(train), held_out=tuple(held_out), dropped=dropped)


def without_duplicates(prompts: Sequence[Prompt]) -> list[Prompt]:
    return list({everything_said(prompt): prompt for prompt in reversed(prompts)}.values())[::-1]


def share_for(prompts: Sequence[Prompt], num_held_out: int) -> float:
    """Return the share by which `split_prompts` holds out so many of these prompts, or some more that open alike."""
    positions = sorted(set(split_positions(without_duplicates(prompts))))
    last = min(num_held_out, len(positions) - 1)
    return (positions[last - 1] + positions[last]) / 2


def split_positions(prompts: Sequence[Prompt]) -> list[float]:
    """Return where each prompt stands in the split, in [0, 1): by what its user says first and its media; by all that the user
    says where more than `MAX_SHARING` prompts open so, which is a template rather than one chat.
    """
    shared = Counter(map(text_hash, (prompt.opening for prompt in prompts)))
    return [
        hash_position(prompt.opening if shared[text_hash(prompt.opening)] <= MAX_SHARING else prompt.user_text)
        for prompt in prompts
    ]


def _guarded(prompt: Prompt) -> list[tuple[str, ...]]:
    """Return what no prompt to train on may share with a held-out one: runs of words or the whole of a shorter text; its media,
    where it has any.
    """
    if prompt.media:
        return [(name,) for name in media_names(prompt.media)]
    words = WORD.findall(prompt.user_text.casefold())
    return list(word_grams(prompt.user_text)) if len(words) >= GUARD_WORDS else [tuple(words)] * bool(words)


def hash_position(text: str) -> float:
    """Return a number in [0, 1), uniform over texts; white space and case make no difference."""
    return ((text_hash(text) % 2**64) >> 11) * 2.0**-53


def word_grams(text: str, num_words: int = GUARD_WORDS) -> Iterator[tuple[str, ...]]:
    """Yield every run of `num_words` words, in lower case and without punctuation; a Chinese character is a word."""
    words = WORD.findall(text.casefold())
    return zip(*(words[start:] for start in range(num_words)), strict=False)


class NearDuplicates:
    """Prompts so far, by their runs of four words; those of fewer words are near to none."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._having: dict[tuple[str, ...], list[int]] = {}

    def add(self, text: str) -> bool:
        """Add a prompt, unless one so far shares `NEAR_SHARE` of its runs; return whether it was added."""
        grams = set(word_grams(text, NEAR_WORDS))
        shared = Counter(place for gram in grams for place in self._having.get(gram, ()))
        if any(count >= NEAR_SHARE * (len(grams) + self._sizes[place] - count) for place, count in shared.items()):
            return False
        for gram in grams:
            self._having.setdefault(gram, []).append(len(self._sizes))
        self._sizes.append(len(grams))
        return True

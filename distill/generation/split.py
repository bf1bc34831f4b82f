"""Prompts to train on and prompts held out: duplicates dropped, split by hash, and nothing of one in the other.

The side a prompt falls on depends on its text alone, so it stays there when prompts are added, removed or reordered, and a
draft trained earlier never saw what a later split holds out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.runtime.errors import InputError
from distill.generation.prompts import Prompt

GUARD_WORDS = 13  # the length of overlap that counts as contamination in the GPT-3 report (2005.14165, appendix C)
DUPLICATE = "duplicate"
OVERLAP = "overlaps_held_out"


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which prompts are trained on and which are held out, each in the order given, and how many were dropped, by reason."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    dropped: dict[str, int]


def split_prompts(prompts: Sequence[Prompt], held_out_share: float) -> Split:
    """Drop duplicates, split by hash, and drop from train what shares 13 words in a row with a held-out prompt.

    Raises:
        InputError: no prompt is left on one of the sides.
    """
    distinct = list({_everything_said(prompt): prompt for prompt in reversed(prompts)}.values())[::-1]
    held_out = [prompt for prompt in distinct if hash_position(prompt.user_text) < held_out_share]
    candidates = [prompt for prompt in distinct if hash_position(prompt.user_text) >= held_out_share]
    known = {gram for prompt in held_out for gram in word_grams(prompt.user_text)}
    train = [prompt for prompt in candidates if known.isdisjoint(word_grams(prompt.user_text))]
    dropped = {DUPLICATE: len(prompts) - len(distinct), OVERLAP: len(candidates) - len(train)}
    if not train or not held_out:
        raise InputError(
            f"the split leaves {len(train)} prompts to train on and {len(held_out)} held out of {len(prompts)} (dropped: "
            f"{dropped[DUPLICATE]} duplicates, {dropped[OVERLAP]} that overlap a held-out one); both need at least one: "
            f"change held_out_share, which is {held_out_share}, or give more prompts"
        )
    return Split(train=tuple(train), held_out=tuple(held_out), dropped=dropped)


def hash_position(text: str) -> float:
    """Return a number in [0, 1), uniform over texts; white space and case make no difference."""
    digest = hashlib.sha256(normalise(text).encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def word_grams(text: str, num_words: int = GUARD_WORDS) -> Iterator[tuple[str, ...]]:
    """Yield every run of `num_words` words, in lower case and without punctuation."""
    words = re.findall(r"\w+", text.casefold())
    return zip(*(words[start:] for start in range(num_words)), strict=False)


def normalise(text: str) -> str:
    """Return a text as it is compared: white space folded, case ignored."""
    return " ".join(text.split()).casefold()


def _everything_said(prompt: Prompt) -> str:
    """Return the text by which prompts count as duplicates: unlike the split, it tells system messages apart."""
    history = [f"{message['role']}: {message['content']}" for message in prompt.history]
    return normalise("\n".join([*history, *prompt.turns]))

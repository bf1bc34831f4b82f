"""Strings that end an answer: which token completes one.

An answer is searched as its text grows token by token, so the same tokens end at the same place however many of them a round
brought. Only the end of the text is decoded: a tail long enough for the longest string and for what decoders do differently at
the beginning of a text, which is to drop a space, or to show the rest of a character whose first bytes lie before it. A
character whose bytes are not all there yet decodes to U+FFFD, which no stop string may hold (`configs.decoding.DecodeConfig`).
Special tokens count as the text that they are written as. Left out on purpose: strings that begin in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

MARGIN = 8  # characters of a tail before those that may belong to a stop string


class StopStrings:
    """The search for some strings in one answer.

    Args:
        tokenizer: of the tokens.
        stops: the strings, none of them empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self._enough = max(map(len, stops)) + MARGIN
        self._tail: list[int] = []  # the last tokens of the answer, all of it while that is short
        self._kept = self._enough  # how many of them stay when there are twice as many

    def completes(self, token: int) -> bool:
        """Take the answer's next token and say whether the text then holds one of the strings."""
        self._tail.append(token)
        text = self._text(self._tail)
        if any(stop in text for stop in self.stops):
            return True
        if len(self._tail) > 2 * self._kept:
            self._shorten()
        return False

    def _shorten(self) -> None:
        """Drop the front of the tail, unless what would stay says too little: tokens may stand for no text at all."""
        shorter = self._tail[-self._kept :]
        if len(self._text(shorter)) >= self._enough:
            self._tail = shorter
        else:
            self._kept = len(self._tail)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

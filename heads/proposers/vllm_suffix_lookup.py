"""Suffix lookup in vLLM 0.32: a proposer class of a user's own (`custom_class`), which vLLM's process imports from an export.

Written by `heads.formats.exporting.exporter` beside `suffixes.py` and the answers, so it imports nothing else of this
project. vLLM gives the class no names of requests, and moves them from place to place: a request is known by its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .suffixes import SuffixText, automaton_of

ANSWERS = "answers.npz"  # `tokens`, int32, and `lengths` of the answers that they are


class VllmSuffixLookup:
    """Drafts for the requests of vLLM's batch; made with vLLM's config."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_tokens = vllm_config.speculative_config.num_speculative_tokens
        self.max_length = vllm_config.model_config.max_model_len
        stored = np.load(Path(__file__).with_name(ANSWERS))
        ends = np.cumsum(stored["lengths"])
        self._memory = automaton_of(answer.tolist() for answer in np.split(stored["tokens"], ends[:-1]))
        self._texts: dict[int, tuple[np.ndarray, SuffixText]] = {}  # by place in the step before: what was read, and its counts

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens: np.ndarray, token_ids: np.ndarray, **_: Any
    ) -> list[list[int]]:
        """Return the drafts of each request.

        Args:
            sampled_token_ids: those that it got in this step; none where its prompt is still being read.
            num_tokens: its tokens, these included, int `[B]`.
            token_ids: int `[B, max_model_len]`.
        """
        drafts, read = list[list[int]](), dict[int, tuple[np.ndarray, SuffixText]]()
        for place, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens[place])
            room = min(self.num_tokens, self.max_length - length - 1)
            if not sampled or room <= 0:
                drafts.append([])
                continue
            ids = token_ids[place, :length].copy()
            text = self._known(place, ids)
            text.read(ids[text.num_read :].tolist())
            drafts.append(text.drafts(room)[0])
            read[place] = ids, text
        self._texts = read
        return drafts

    def _known(self, place: int, ids: np.ndarray) -> SuffixText:
        """Return what was read of this request, mostly at the same place; a new one where nothing was."""
        for known in (place, *self._texts):
            before, text = self._texts.get(known, (ids[:0], None))
            if text is not None and np.array_equal(before, ids[: len(before)]):
                del self._texts[known]
                return text
        return SuffixText(self._memory)

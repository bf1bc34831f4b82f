"""Rows of token ids: chats whose messages are spelled in ids, so that they are read as they were served, by no tokenizer.

    prompt_ids    what the target reads [sample, answer_ids]; several rows of one prompt are told apart by `sample`
    loss_mask     of a whole chat, 1 for each of its `input_ids` that the target wrote, else 0, as of speculators and
                  SpecForge; in rows of Model-Optimizer the ids are `token_ids`

A user's message is then whatever was read before an answer. What follows the last answer is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from configs.runtime.errors import InputError
from distill.dataset.batches import spans_of
from distill.dataset.conversations import Message
from distill.generation.bad_rows import BadRow


def chat_in_ids(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a row of ids; `BadRow` where these are none, or none is to be learnt."""
    if row.get("loss_mask") is None:
        sample = f" #{row['sample']}" if row.get("sample") is not None else ""
        answer = () if row.get("answer_ids") is None else (spelled(_ids(row, "answer_ids")),)
        return _messages(spelled(_ids(row, "prompt_ids")) + sample, *answer)
    ids = _ids(row, "token_ids" if row.get("input_ids") is None else "input_ids")
    edges = [0, *chain.from_iterable(spans_of(_flags(row["loss_mask"], len(ids))))]
    if len(edges) == 1:
        raise BadRow("nothing_learnt", "loss_mask must mark an id after the first, and marks none")
    return _messages(*(spelled(ids[start:end]) for start, end in pairwise(edges)))


def spelled(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def ids_in(text: str, vocab_size: int) -> list[int]:
    """Return the ids that a text spells, without what follows a `#` in a line; `InputError` for one beyond the vocabulary."""
    try:
        ids = [int(number) for line in text.splitlines() for number in line.partition("#")[0].split()]
    except ValueError as error:
        raise InputError(f"of_ids: messages must be spelled in token ids: {error}") from error
    if outside := [token for token in ids if not 0 <= token < vocab_size]:
        raise InputError(f"token id {outside[0]} lies outside the target's vocabulary of {vocab_size}")
    return ids


def _messages(*texts: str) -> list[Message]:
    return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)]


def _ids(row: Mapping[str, Any], key: str) -> list[int]:
    ids = _flat(row.get(key))
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise BadRow("ids", f"{key} must be a list of token ids, at least one, got {str(ids)[:60]!r}")
    return ids


def _flags(given: Any, length: int) -> list[bool]:
    """Return which ids were written by the target; the first one was not, which nothing predicts."""
    mask = _flat(given)
    if not isinstance(mask, list) or len(mask) != length or not all(flag in (0, 1) for flag in mask):
        raise BadRow("loss_mask", f"loss_mask must have 0 or 1 for each of the {length} ids, got {str(given)[:60]!r}")
    return [False, *map(bool, mask[1:])]


def _flat(given: Any) -> Any:
    """Return the only row of a batch of one, as SpecForge keeps its tensors."""
    return given[0] if isinstance(given, list) and len(given) == 1 and isinstance(given[0], list) else given

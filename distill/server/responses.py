"""A server's answers: their form, and the most likely tokens before each label, checked before they enter a cache.

Position j of an answer is the distribution of token j given those before it, so it is the target's output at position j - 1.
Its entries are keyed by token id; the token that really follows is among them in addition, whatever its rank.
T tokens sent, N labels, K kept tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from configs.runtime.errors import InputError
from distill.dataset.batches import Example

Distribution = Mapping[int, float]  # log-probabilities by token id, of the tokens that the server returned

# Probabilities from log-probabilities rounded to bfloat16 sum to 1 within this; those from logits do not.
MASS_SLACK = 0.01
TOKEN_ID = re.compile(r"token_id:(\d+)")


class Model(BaseModel):
    """A model that a server has."""

    id: str
    max_model_len: int | None = None  # tokens, prompt and answer together; only vLLM gives it


class ModelList(BaseModel):
    """The answer to `GET models`."""

    data: list[Model]


class PromptLogprob(BaseModel):
    """One token of one position, as `prompt_logprobs` gives it."""

    logprob: float


class NextLogprobs(BaseModel):
    """The `logprobs` of a choice, by position of the answer."""

    top_logprobs: list[dict[str, float]] | None = None


class CompletionChoice(BaseModel):
    """One of a server's completions; only one is requested."""

    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    logprobs: NextLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None  # of the answer, the token that ended it included
    finish_reason: str | None = None  # stop, length, or why there is no whole answer


class Usage(BaseModel):
    """The server's token counts."""

    prompt_tokens: int | None = None


class Completion(BaseModel):
    """The answer to `POST completions`."""

    choices: Annotated[list[CompletionChoice], Field(min_length=1)]
    usage: Usage | None = None
    system_fingerprint: str | None = None  # changes with the server's version and settings

    @property
    def num_read(self) -> int | None:
        """How many tokens of the prompt the server counted."""
        return None if self.usage is None else self.usage.prompt_tokens

    def next_token(self, where: str) -> Distribution:
        """Return the distribution of the answer's first token; empty where there is none.

        Raises:
            InputError: tokens are named by their text, of which several can share one.
        """
        logprobs = self.choices[0].logprobs
        first = (logprobs.top_logprobs if logprobs is not None else None) or [{}]
        return {_token_id(name, where): value for name, value in first[0].items()}


class TopK(NamedTuple):
    """The K most likely tokens before each label, most likely first."""

    log_probs_NK: Tensor  # float64
    token_ids_NK: Tensor  # int64


def read_completion(content: Any, where: str) -> Completion:
    """Return an answer to `POST completions`; `InputError`, which begins with `where`, if it has another form."""
    try:
        return Completion.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        finding = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise InputError(f"{where} answers in a form that is not known here: {finding}") from error


def check_read(completion: Completion, sent: Sequence[int], where: str) -> None:
    """Raise `InputError` for an answer that names other token counts or token ids than those sent."""
    _check_tokens([completion.num_read], completion.choices[0].prompt_token_ids, sent, where)


def read_top_k(completion: Completion, example: Example, *, k: int, vocab_size: int, where: str) -> TopK:
    """Return the `k` most likely tokens before each label of an example.

    Raises:
        InputError: the answer has no log-probabilities of the prompt, or those of other tokens than were sent; a position has
            none or fewer than `k`; an id lies outside the vocabulary; values are no log-probabilities.
    """
    choice = completion.choices[0]
    found = choice.prompt_logprobs
    if found is None:
        raise InputError(
            f"{where} answers without log-probabilities of the prompt (prompt_logprobs), which identify its model and "
            "are what a target cache holds: use a server that gives them, such as vLLM"
        )
    _check_tokens([len(found), completion.num_read], choice.prompt_token_ids, example.input_ids, where)
    rows = [
        _most_likely(found[position], k, vocab_size, f"{where}, position {position} of {len(found)}")
        for position in range(example.answer_start, len(found))
    ]
    return TopK(
        log_probs_NK=torch.tensor([[log_p for log_p, _ in row] for row in rows], dtype=torch.float64),
        token_ids_NK=torch.tensor([[index for _, index in row] for row in rows]),
    )


def _check_tokens(counts: Sequence[int | None], read: Sequence[int] | None, sent: Sequence[int], where: str) -> None:
    """Refuse an answer whose token counts or token ids differ from those sent."""
    num_read = next((number for number in counts if number not in (None, len(sent))), None)
    if num_read is not None:
        raise InputError(
            f"{where} answers for {num_read} tokens where {len(sent)} were sent: it cuts prompts off (raise its longest "
            "context, or send less) or adds tokens of its own"
        )
    if read is not None and list(read) != list(sent):
        raise InputError(f"{where} read other token ids than were sent; the target's ids mean something else to it")


def _most_likely(entries: Mapping[int, PromptLogprob] | None, k: int, vocab_size: int, where: str) -> list[tuple[float, int]]:
    """Return the `k` most likely (log-probability, id) of one position, ties by id."""
    if entries is None:
        raise InputError(f"{where}: the answer has no log-probabilities there")
    distribution = {index: entry.logprob for index, entry in entries.items()}
    if len(distribution) < k:
        raise InputError(
            f"{where}: expected {k} log-probabilities (k), got {len(distribution)}; "
            f"raise the server's limit (vLLM: --max-logprobs {k}) or lower k"
        )
    if not all(map(math.isfinite, distribution.values())):  # before sorting, which not-a-numbers make meaningless
        raise InputError(f"{where}: a log-probability is not finite")
    row = sorted(((value, index) for index, value in distribution.items()), key=lambda pair: (-pair[0], pair[1]))[:k]
    outside = next((index for _, index in row if not 0 <= index < vocab_size), None)
    if outside is not None:
        raise InputError(
            f"{where}: token id {outside} lies outside the target's vocabulary of {vocab_size}; the server has another model, "
            "or k is so large that it reaches ids that no token has"
        )
    mass = sum(math.exp(min(value, 1.0)) for value, _ in row)
    if mass > 1 + MASS_SLACK:
        raise InputError(f"{where}: the {k} values are no log-probabilities: their probabilities add up to more than 1")
    return row


def _token_id(name: str, where: str) -> int:
    found = TOKEN_ID.fullmatch(name)
    if found is None:
        raise InputError(f"{where} names tokens by text ({name[:20]!r}), not by id: it ignores return_tokens_as_token_ids")
    return int(found[1])

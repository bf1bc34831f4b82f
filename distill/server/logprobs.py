"""A client for the target behind an OpenAI-compatible API: the model it serves, and its log-probabilities of given token ids.

The log-probabilities of a prompt are asked for by vLLM's `prompt_logprobs`. Not chat completions: they take text, which would
be tokenised again. K kept tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.data import ServerConfig
from distill.dataset.batches import Example
from distill.server.connection import Connection, Refused
from distill.server.responses import Model, ModelList, TopK, read_completion, read_top_k


class TargetServer:
    """One model of one server. To be used in a `with` statement, which closes its connections."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.connection = Connection(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.connection.close()

    def check_model(self) -> Model:
        """Check that the server can be reached and has the model, and return its description of it.

        Raises:
            InputError: it cannot be reached, is no such API, wants another key, or has no model of that name.
        """
        where = f"server.url: {self.config.url}"
        try:
            content = self.connection.send("GET", "models")
        except Refused as refused:
            raise InputError(
                f"{where} has no list of models (status {refused.status}): give the address of the API, such as "
                "http://host:8000/v1"
            ) from refused
        try:
            served = ModelList.model_validate(content).data
        except ValidationError as error:
            raise InputError(f"{where} does not list its models as an OpenAI-compatible API does") from error
        found = next((model for model in served if model.id == self.config.model), None)
        if found is None:
            names = ", ".join(model.id for model in served) or "no model"
            raise InputError(f"server.model: {self.config.url} serves {names}, got {self.config.model}")
        return found

    def top_k(self, examples: Sequence[Example], k: int, vocab_size: int) -> Iterator[TopK]:
        """Yield the `k` most likely tokens before each label of the examples, in their order.

        Raises:
            InputError: the server cannot be reached, refuses, or gives an impossible answer (see `read_top_k`).
        """
        with ThreadPoolExecutor(max_workers=self.config.concurrency) as pool:
            yield from pool.map(lambda example: self._ask(example, k, vocab_size), examples)

    def _ask(self, example: Example, k: int, vocab_size: int) -> TopK:
        where, ids = f"server.url: {self.config.url}", list(example.input_ids)
        body = {
            "model": self.config.model,
            "prompt": ids,
            "temperature": 0,
            "prompt_logprobs": k,
            "max_tokens": 1,  # at least one token has to be generated; it is not used
            "return_token_ids": True,
        }
        try:
            content = self.connection.send("POST", "completions", body)
        except Refused as refused:
            hint = ""
            if "logprob" in refused.complaint.lower():
                hint = f"; k asks for {k} log-probabilities a position: start vLLM with --max-logprobs {k}, or lower k"
            raise InputError(
                f"{where} refuses a conversation of {len(ids)} tokens, and room for one more (status {refused.status}): "
                f"{refused.complaint}{hint}"
            ) from refused
        return read_top_k(read_completion(content, where), example, k=k, vocab_size=vocab_size, where=where)

"""A client for the target behind an OpenAI-compatible API: the model it serves, and its log-probabilities of given token ids.

There are two ways to request the log-probabilities of a prompt, both known to vLLM: its own `prompt_logprobs`, and the older
`echo` with `logprobs`. The first that is answered is used from then on. Not chat completions: they take text, which would be
tokenised anew. K kept tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.data import ServerConfig
from distill.dataset.batches import Example
from distill.server.connection import Connection, Refused
from distill.server.responses import Completion, Model, ModelList, TopK, read_completion, read_top_k


class TargetServer:
    """One model of one server. To be used in a `with` statement, which closes its connections."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.connection = Connection(config)
        self._ways: tuple[Callable[[int], dict[str, Any]], ...] = (_prompt_logprobs, _echo)

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
        where = f"server.url: {self.config.url}"
        for way in self._ways:
            body = {"model": self.config.model, "prompt": list(example.input_ids), "temperature": 0, **way(k)}
            completion = self._complete(body)
            distributions = completion.distributions(where)
            if distributions is not None:
                self._ways = (way,)
                return read_top_k(completion, distributions, example, k=k, vocab_size=vocab_size, where=where)
        raise InputError(
            f"{where} answers without log-probabilities of the prompt, neither to prompt_logprobs nor to echo with logprobs; "
            "they identify the model it serves, and a target cache holds them: use a server that gives them, such as vLLM"
        )

    def _complete(self, body: dict[str, Any]) -> Completion:
        where = f"server.url: {self.config.url}"
        try:
            content = self.connection.send("POST", "completions", body)
        except Refused as refused:
            hint = ""
            if "logprob" in refused.complaint.lower():
                k = body.get("prompt_logprobs") or body["logprobs"]
                hint = f"; k asks for {k} log-probabilities a position: start vLLM with --max-logprobs {k}, or lower k"
            tokens = f"{len(body['prompt'])} tokens, and room for one more"
            raise InputError(
                f"{where} refuses a conversation of {tokens} (status {refused.status}): {refused.complaint}{hint}"
            ) from refused
        return read_completion(content, where)


def _prompt_logprobs(k: int) -> dict[str, Any]:
    # At least one token has to be generated; it is not used.
    return {"prompt_logprobs": k, "max_tokens": 1, "return_token_ids": True}


def _echo(k: int) -> dict[str, Any]:
    return {"echo": True, "logprobs": k, "max_tokens": 0, "return_tokens_as_token_ids": True}

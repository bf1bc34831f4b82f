"""A client for the target as a server: an OpenAI-compatible API asked what it makes of texts that it is given as token ids.

Sends `POST completions`, a bounded number at a time, and again where the connection or the server failed; what an answer says
is `distill.server_answers`. There are two ways to ask for the log-probabilities of a prompt, both known to vLLM: its own
`prompt_logprobs`, and `echo` with `logprobs`, the older one. The first that gets an answer with log-probabilities is kept.

Left out on purpose: chat completions, which take text and would be tokenised anew, and log-probabilities of text that the
server writes itself. K kept tokens.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import httpx2
from pydantic import ValidationError

from configs.errors import InputError, first_line
from configs.schema import ServerConfig
from distill.batches import Example
from distill.server_answers import Completion, Models, TopK, read_top_k

logger = logging.getLogger("draftsmith")

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
TOO_MANY_REQUESTS = 429
MAX_QUOTED = 300  # characters of a server's own complaint


class TargetServer:
    """One model of one server. To be used in a `with` statement, which closes its connections.

    Args:
        config: where it is and how it is to be asked.

    Raises:
        InputError: the environment variable with the key is not set.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._ways: tuple[Callable[[int], dict[str, Any]], ...] = (_prompt_logprobs, _echo)
        self._client = httpx2.Client(
            base_url=config.url,
            headers=_authorization(config.api_key_variable),
            timeout=config.timeout_seconds,
            limits=httpx2.Limits(max_connections=config.concurrency),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._client.close()

    def check_model(self) -> None:
        """See that the server is there and has the model.

        Raises:
            InputError: it is not there, is no such API, wants another key, or has no model of that name.
        """
        response = self._send("GET", "models", None)
        try:
            served = [model.id for model in Models.model_validate_json(response.content).data]
        except ValidationError as error:
            raise InputError(
                f"server.url: {self.config.url} does not list its models as an OpenAI-compatible API does"
            ) from error
        if self.config.model not in served:
            names = ", ".join(served) or "no model"
            raise InputError(f"server.model: {self.config.url} serves {names}, got {self.config.model}")

    def top_k(self, examples: Sequence[Example], k: int, vocab_size: int) -> Iterator[TopK]:
        """Yield what the server says before each label of the examples, in their order.

        Args:
            examples: token ids, of which those from `answer_start` on are labels.
            k: how many of the likeliest tokens are asked for.
            vocab_size: ids that there are.

        Raises:
            InputError: the server cannot be reached, refuses, or answers what cannot be right (see `read_top_k`).
        """
        with ThreadPoolExecutor(max_workers=self.config.concurrency) as pool:
            yield from pool.map(lambda example: self._ask(example, k, vocab_size), examples)

    def _ask(self, example: Example, k: int, vocab_size: int) -> TopK:
        where = f"server.url: {self.config.url}"
        for way in self._ways:
            body = {"model": self.config.model, "prompt": list(example.input_ids), "temperature": 0, **way(k)}
            response = self._send("POST", "completions", body)
            try:
                completion = Completion.model_validate_json(response.content)
            except ValidationError as error:
                raise InputError(f"{where} answers in a form that is not known here: {_finding(error)}") from error
            laws = completion.laws(where)
            if laws is not None:
                self._ways = (way,)
                return read_top_k(completion, laws, example, k=k, vocab_size=vocab_size, where=where)
        raise InputError(
            f"{where} answers without log-probabilities of the prompt, neither to prompt_logprobs nor to echo with logprobs; "
            "a target cache needs a server that gives them, such as vLLM"
        )

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx2.Response:
        """Return a successful response, after further attempts where the trouble may pass.

        Raises:
            InputError: none came, or the server refuses.
        """
        for attempt in range(self.config.retries + 1):
            wait = min(FIRST_WAIT_SECONDS * 2**attempt, LONGEST_WAIT_SECONDS)
            try:
                response = self._client.request(method, path, json=body)
            except httpx2.RequestError as error:
                trouble = f"cannot be reached ({type(error).__name__}: {first_line(error)})"
            else:
                if response.is_success:
                    return response
                if response.status_code != TOO_MANY_REQUESTS and not response.is_server_error:
                    raise InputError(self._refusal(response, body))
                trouble = f"answers with status {response.status_code}: {_complaint(response)}"
                wait = _asked_wait(response) or wait
            if attempt < self.config.retries:
                logger.warning("server %s %s; trying again in %.1f s", self.config.url, trouble, wait)
                time.sleep(wait)
        attempts = f"{self.config.retries + 1} attempts (server.retries, server.timeout_seconds)"
        raise InputError(f"server.url: {self.config.url} {trouble}; gave up after {attempts}")

    def _refusal(self, response: httpx2.Response, body: dict[str, Any] | None) -> str:
        """Return the sentence for a request that will not be answered however often it is sent."""
        where, status = f"server.url: {self.config.url}", f"status {response.status_code}"
        if response.status_code in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
            key = self.config.api_key_variable
            sent = f"the key in {key}" if key else "requests without a key; name its variable in server.api_key_variable"
            return f"{where} refuses {sent} ({status})"
        complaint = _complaint(response)
        if body is None:
            return f"{where} has no list of models ({status}): give the address of the API, such as http://host:8000/v1"
        hint = ""
        if "logprob" in complaint.lower():
            k = body.get("prompt_logprobs") or body["logprobs"]
            hint = f"; k asks for {k} log-probabilities a position: start vLLM with --max-logprobs {k}, or lower k"
        tokens = f"{len(body['prompt'])} tokens, and room for one more"
        return f"{where} refuses a conversation of {tokens} ({status}): {complaint}{hint}"


def _prompt_logprobs(k: int) -> dict[str, Any]:
    # One token has to be written; it is thrown away.
    return {"prompt_logprobs": k, "max_tokens": 1, "return_token_ids": True}


def _echo(k: int) -> dict[str, Any]:
    return {"echo": True, "logprobs": k, "max_tokens": 0, "return_tokens_as_token_ids": True}


def _authorization(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise InputError(f"server.api_key_variable: the environment variable {variable} is not set")
    return {"Authorization": f"Bearer {key}"}


def _asked_wait(response: httpx2.Response) -> float | None:
    """Return the seconds that the server asks to be left alone for, at most `LONGEST_WAIT_SECONDS`; None if it names none."""
    seconds = response.headers.get("retry-after", "")
    return min(float(seconds), LONGEST_WAIT_SECONDS) if seconds.isdecimal() else None


def _complaint(response: httpx2.Response) -> str:
    """Return what the server says went wrong, on one line and not too long."""
    try:
        content = response.json()
    except ValueError:
        content = None
    error = content.get("error", content.get("detail")) if isinstance(content, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    text = " ".join((said if isinstance(said, str) else response.text).split()) or "it does not say why"
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."


def _finding(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"

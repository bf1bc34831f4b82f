"""One request to a server: its answer, with further attempts where the failure may be temporary.

httpx itself repeats failed connections alone, so what a loaded server says (408, 429, 5xx, a cut-off answer) is waited out:
waits grow and are randomised, so that requests that failed together are not repeated together, and the seconds that a server
asks for (Retry-After) are kept. The key is read from the environment, and masked where a server repeats it.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from threading import Event
from typing import Annotated, Any

import httpx2
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from configs.runtime.errors import InputError, first_finding, first_line
from configs.runtime.redaction import hide, redact
from configs.schema.data import ServerConfig

logger = logging.getLogger("draftsmith")

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
LONGEST_ASKED_WAIT_SECONDS = 600.0  # a longer Retry-After counts as this
JITTER = 0.5  # a wait is drawn from its mean, this share less or more
PASSING = (httpx2.codes.REQUEST_TIMEOUT, httpx2.codes.TOO_MANY_REQUESTS)  # and every 5xx
MAX_QUOTED = 300  # characters of a server's error message
TOKEN_ID = re.compile(r"token_id:(\d+)")

Distribution = Mapping[int, float]  # log-probabilities by token id, of the tokens that the server returned


class Model(BaseModel):
    """A model that a server has."""

    id: str
    max_model_len: int | None = None  # tokens, prompt and answer together; only vLLM gives it


class PromptLogprob(BaseModel):
    """One token of one position, as `prompt_logprobs` gives it."""

    logprob: float


class _NextLogprobs(BaseModel):
    top_logprobs: list[dict[str, float]] | None = None  # by position of the answer


class CompletionChoice(BaseModel):
    """One of a server's completions; only one is requested."""

    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    logprobs: _NextLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None  # of the answer, the token that ended it included
    finish_reason: str | None = None  # stop, length, or why there is no whole answer


class _Transfer(BaseModel):
    hidden_states_path: str


class Completion(BaseModel):
    """The answer to `POST completions`."""

    choices: Annotated[list[CompletionChoice], Field(min_length=1)]
    usage: dict[str, Any] | None = None
    kv_transfer_params: _Transfer | None = None  # where a server of hidden states leaves them

    def next_token(self, where: str) -> Distribution:
        """Return the distribution of the answer's first token; empty where there is none."""
        logprobs = self.choices[0].logprobs
        first = (logprobs.top_logprobs if logprobs is not None else None) or [{}]
        found = {TOKEN_ID.fullmatch(name): log_p for name, log_p in first[0].items()}
        if None in found:
            raise InputError(f"{where} names tokens by text, not by id: it ignores return_tokens_as_token_ids")
        return {int(match[1]): log_p for match, log_p in found.items() if match is not None}

    def check_read(self, sent: Sequence[int], where: str) -> None:
        """Raise `InputError` where it names other token counts or token ids than those sent."""
        choice = self.choices[0]
        logprobs = None if choice.prompt_logprobs is None else len(choice.prompt_logprobs)
        for number in (logprobs, (self.usage or {}).get("prompt_tokens")):
            if number not in (None, len(sent)):
                counts = f"for {number} tokens where {len(sent)} were sent"
                raise InputError(f"{where} answers {counts}: it cuts prompts off (raise its longest context) or adds tokens")
        if choice.prompt_token_ids is not None and choice.prompt_token_ids != list(sent):
            raise InputError(f"{where} read other token ids than were sent; the target's ids mean something else to it")


class GaveUp(InputError):
    """A request failed at every attempt."""


class Refused(InputError):
    """The server refuses a request; another attempt would not help."""


class _MayPass(Exception):
    """An attempt failed, and another one may not; the second argument are the seconds that the server asks to wait."""


class Connection(AbstractContextManager["Connection"]):
    """The HTTP client of one server, for several threads at once; `named_in` is the setting that names it, for errors."""

    def __init__(self, config: ServerConfig, named_in: str = "server.url") -> None:
        self.config, self.section = config, named_in.rpartition(".")[0]
        self.where = f"{named_in}: {config.url}"  # what begins each complaint about the server
        variable = config.api_key_variable
        key = None if variable is None else os.environ.get(variable)
        if variable is not None and not key:
            raise InputError(f"{self.section}.api_key_variable: the environment variable {variable} is not set")
        if key is not None:
            hide(key)
        self._stopping = Event()
        self._client = httpx2.Client(
            base_url=config.url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=config.timeout_seconds,
            limits=httpx2.Limits(max_connections=config.concurrency),
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def stop(self) -> None:
        """Make no further attempts: requests under way end with their current one."""
        self._stopping.set()

    def check_model(self) -> Model:
        """Return the server's description of the model that the config names; `InputError` where it has none of that name."""
        served = {model.id: model for model in self.models()}
        if self.config.model not in served:
            names = ", ".join(served) or "no model"
            raise InputError(f"{self.section}.model: {self.config.url} serves {names}, got {self.config.model}")
        return served[self.config.model]

    def models(self) -> list[Model]:
        """Return the models of the server; `InputError` where it cannot be reached, or is no OpenAI-compatible API."""
        try:
            return [Model.model_validate(each) for each in self.send("GET", "models")["data"]]
        except (Refused, ValidationError, LookupError, TypeError) as error:
            raise InputError(f"{self.where} has no list of models: give an API, such as http://host:8000/v1") from error

    def complete(self, body: dict[str, Any]) -> Completion:
        """Return the answer to `POST completions`; for errors see `send` and `read_completion`."""
        return read_completion(self.send("POST", "completions", body), self.where)

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of a successful answer, after further attempts where the failure may be temporary.

        `GaveUp` says that every attempt failed, `Refused` that the server refuses the request.
        """
        for attempt in itertools.count(1):
            try:
                return self._attempt(method, path, body)
            except _MayPass as error:
                failure, asked_wait = error.args
            if attempt > self.config.retries or self._stopping.is_set():
                break
            mean = min(FIRST_WAIT_SECONDS * 2.0 ** min(attempt - 1, 30), LONGEST_WAIT_SECONDS)
            wait = max(mean * random.uniform(1 - JITTER, 1 + JITTER), asked_wait)
            logger.warning("server %s %s; trying again in %.1f s", self.config.url, failure, wait)
            pause(self._stopping, wait)
        tried = f"{attempt} attempts ({self.section}.retries, {self.section}.timeout_seconds)"
        raise GaveUp(f"{self.where} {failure}; gave up after {tried}")

    def _attempt(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            response = self._client.request(method, path, json=body)
            status = response.status_code
            if response.is_success:
                return from_json(response.content)
        except httpx2.RequestError as error:
            raise _MayPass(f"cannot be reached ({type(error).__name__}: {first_line(error)})", 0.0) from error
        except ValueError as error:  # a body without a length that was cut off ends like a whole one
            raise _MayPass("answers with JSON that is cut off or damaged", 0.0) from error
        if status in PASSING or response.is_server_error:
            seconds = response.headers.get("retry-after", "")
            asked_wait = min(float(seconds), LONGEST_ASKED_WAIT_SECONDS) if seconds.isdecimal() else 0.0
            raise _MayPass(f"answers with status {status}: {_complaint(response)}", asked_wait)
        if status in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
            key = self.config.api_key_variable
            sent = f"the key in {key}" if key else f"requests without one; name its variable in {self.section}.api_key_variable"
            raise InputError(f"{self.where} refuses {sent} (status {status})")
        raise Refused(f"{self.where} refuses a request (status {status}): {_complaint(response)}")


def _complaint(response: httpx2.Response) -> str:
    """Return the server's error message on one line, shortened, without the key."""
    return redact(" ".join(response.text.split()) or "it does not say why")[:MAX_QUOTED]


def pause(stopping: Event, seconds: float) -> None:
    stopping.wait(seconds)


def read_completion(content: Any, where: str) -> Completion:
    """Return an answer to `POST completions`; `InputError`, which begins with `where`, if it has another form."""
    try:
        return Completion.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{where} answers in a form that is not known here: {first_finding(error)}") from error

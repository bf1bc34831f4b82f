"""Sending to a server: one request, its answer's JSON whole, and further attempts where the trouble may pass.

Waits grow from one attempt to the next and are spread at random, so that requests that failed together do not come again
together; a wait that the server asks for (Retry-After) is kept. The key is read from the environment, sent, and masked where a
server repeats it. What is asked and what an answer means is left to `distill.server.logprobs` and
`distill.generation.server_completions`.
"""

from __future__ import annotations

import logging
import os
import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from threading import Event
from typing import Any

import httpx2
from pydantic_core import from_json

from configs.runtime.errors import InputError, first_line
from configs.runtime.redaction import hide, redact
from configs.schema.data import ServerConfig

logger = logging.getLogger("draftsmith")

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
LONGEST_ASKED_WAIT_SECONDS = 600.0  # a server that asks for a longer one is asked again after this
SPREAD = 0.5  # a wait is drawn from its mean, this share less or more
PASSING = (httpx2.codes.REQUEST_TIMEOUT, httpx2.codes.TOO_MANY_REQUESTS)  # and every 5xx
MAX_QUOTED = 300  # characters of a server's own complaint


class GaveUp(InputError):
    """No whole answer came to a request, however often it was sent."""


class Refused(InputError):
    """The server will not answer a request however often it is sent.

    Args:
        url: the server's address.
        status: of its answer.
        complaint: what it says went wrong, on one line.
    """

    def __init__(self, url: str, status: int, complaint: str) -> None:
        super().__init__(f"server.url: {url} refuses a request (status {status}): {complaint}")
        self.status, self.complaint = status, complaint


class _Trouble(Exception):
    """What went wrong with one attempt; `wait` is what the server asks for, in seconds, None if it asks for none."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class Connection:
    """The way to one server, for several threads at once.

    Args:
        config: where it is, how long to wait for an answer, and how often to ask again.

    Raises:
        InputError: the environment variable with the key is not set.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        key = _read_key(config.api_key_variable)
        self._stopping = Event()
        self._client = httpx2.Client(
            base_url=config.url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=config.timeout_seconds,
            limits=httpx2.Limits(max_connections=config.concurrency),
        )

    def stop(self) -> None:
        """Let requests under way come to an end; none is sent again, nor waited for to be."""
        self._stopping.set()

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of a successful answer, after further attempts where the trouble may pass.

        Raises:
            GaveUp: none came.
            Refused: the server refuses.
            InputError: it refuses the key.
        """
        attempts = 0
        while True:
            attempts += 1
            try:
                return self._send_once(method, path, body)
            except _Trouble as met:
                trouble, asked_wait = str(met), met.wait
            if attempts > self.config.retries or self._stopping.is_set():
                break
            wait = max(_mean_wait(attempts) * random.uniform(1 - SPREAD, 1 + SPREAD), asked_wait or 0.0)
            logger.warning("server %s %s; trying again in %.1f s", self.config.url, trouble, wait)
            pause(self._stopping, wait)
        tried = f"{attempts} attempts (server.retries, server.timeout_seconds)"
        raise GaveUp(f"server.url: {self.config.url} {trouble}; gave up after {tried}")

    def version(self) -> str | None:
        """Return the version that the server names as vLLM does, beside its API; None where it names none."""
        root = self.config.url.rstrip("/").removesuffix("/v1")
        try:
            response = self._client.get(f"{root}/version")
            content = from_json(response.content) if response.is_success else None
        except (httpx2.RequestError, ValueError):
            return None
        version = content.get("version") if isinstance(content, dict) else None
        return version[:MAX_QUOTED] if isinstance(version, str) else None

    def _send_once(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            response = self._client.request(method, path, json=body)
        except httpx2.RequestError as error:
            raise _Trouble(f"cannot be reached ({type(error).__name__}: {first_line(error)})") from error
        status = response.status_code
        if response.is_success:
            try:
                return from_json(response.content)
            except ValueError as error:  # a body without a length that was cut off ends like a whole one
                raise _Trouble("answers with JSON that is cut off or damaged") from error
        if status in PASSING or response.is_server_error:
            raise _Trouble(f"answers with status {status}: {self._complaint(response)}", _asked_wait(response))
        if status in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
            key = self.config.api_key_variable
            sent = f"the key in {key}" if key else "requests without a key; name its variable in server.api_key_variable"
            raise InputError(f"server.url: {self.config.url} refuses {sent} (status {status})")
        raise Refused(self.config.url, status, self._complaint(response))

    def _complaint(self, response: httpx2.Response) -> str:
        """Return what the server says went wrong, on one line and not too long, without the key."""
        try:
            content = from_json(response.content)
        except ValueError:
            content = None
        error = content.get("error", content.get("detail")) if isinstance(content, dict) else None
        said = error.get("message") if isinstance(error, dict) else error
        text = redact(" ".join((said if isinstance(said, str) else response.text).split()) or "it does not say why")
        return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."


def pause(stopping: Event, seconds: float) -> None:
    """Wait, but not after `stopping` is set."""
    stopping.wait(seconds)


def _read_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise InputError(f"server.api_key_variable: the environment variable {variable} is not set")
    hide(key)
    return key


def _mean_wait(attempts: int) -> float:
    """Return the seconds before the next attempt, on average."""
    return min(FIRST_WAIT_SECONDS * 2.0 ** min(attempts - 1, 30), LONGEST_WAIT_SECONDS)


def _asked_wait(response: httpx2.Response) -> float | None:
    """Return the seconds that the server asks to be left alone for, as a number or a date; None if it names none."""
    text = response.headers.get("retry-after", "")
    if text.isdecimal():
        seconds = float(text)
    else:
        try:
            date = parsedate_to_datetime(text)
        except (TypeError, ValueError):
            return None
        zoned = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
        seconds = (zoned - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), LONGEST_ASKED_WAIT_SECONDS)

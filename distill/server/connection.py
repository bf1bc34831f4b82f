"""One request to a server: its JSON answer, with further attempts where the failure may be temporary.

Waits grow and are randomised, so that requests that failed together are not repeated together; the seconds that a server asks
for (Retry-After) are kept. The key is read from the environment, and masked where a server repeats it.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
from threading import Event
from typing import Any

import httpx2
from pydantic_core import from_json

from configs.runtime.errors import InputError, first_line
from configs.runtime.redaction import hide, redact
from configs.schema.data import ServerConfig

logger = logging.getLogger("draftsmith")

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
LONGEST_ASKED_WAIT_SECONDS = 600.0  # a longer Retry-After counts as this
JITTER = 0.5  # a wait is drawn from its mean, this share less or more
PASSING = (httpx2.codes.REQUEST_TIMEOUT, httpx2.codes.TOO_MANY_REQUESTS)  # and every 5xx
MAX_QUOTED = 300  # characters of a server's error message


class GaveUp(InputError):
    """A request failed at every attempt."""


class Refused(InputError):
    """The server refuses a request; another attempt would not help."""

    def __init__(self, key: str, url: str, status: int, complaint: str) -> None:
        super().__init__(f"{key}: {url} refuses a request (status {status}): {complaint}")
        self.status, self.complaint = status, complaint


class _MayPass(Exception):
    """An attempt failed, and another one may not; `asked_wait` are the seconds that the server asks to wait."""

    def __init__(self, failure: str, asked_wait: float = 0.0) -> None:
        super().__init__(failure)
        self.asked_wait = asked_wait


class Connection:
    """The HTTP client of one server, for several threads at once; `InputError` where the key's variable is not set.

    `named_in` is the setting that names the server, for errors; they look for the other settings in its section.
    """

    def __init__(self, config: ServerConfig, named_in: str = "server.url") -> None:
        self.config, self.named_in = config, named_in
        key = self._read_key(config.api_key_variable)
        self._stopping = Event()
        self._client = httpx2.Client(
            base_url=config.url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=config.timeout_seconds,
            limits=httpx2.Limits(max_connections=config.concurrency),
        )

    def stop(self) -> None:
        """Make no further attempts: requests under way end with their current one."""
        self._stopping.set()

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of a successful answer, after further attempts where the failure may be temporary.

        Raises:
            GaveUp: every attempt failed.
            Refused: the server refuses the request.
            InputError: it refuses the key.
        """
        for attempt in itertools.count(1):
            try:
                return self._attempt(method, path, body)
            except _MayPass as error:
                failure = error
            if attempt > self.config.retries or self._stopping.is_set():
                break
            mean = min(FIRST_WAIT_SECONDS * 2.0 ** min(attempt - 1, 30), LONGEST_WAIT_SECONDS)
            wait = max(mean * random.uniform(1 - JITTER, 1 + JITTER), failure.asked_wait)
            logger.warning("server %s %s; trying again in %.1f s", self.config.url, failure, wait)
            pause(self._stopping, wait)
        section = self.named_in.rpartition(".")[0]
        tried = f"{attempt} attempts ({section}.retries, {section}.timeout_seconds)"
        raise GaveUp(f"{self.named_in}: {self.config.url} {failure}; gave up after {tried}")

    def _attempt(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            response = self._client.request(method, path, json=body)
        except httpx2.RequestError as error:
            raise _MayPass(f"cannot be reached ({type(error).__name__}: {first_line(error)})") from error
        if response.status_code in PASSING or response.is_server_error:
            failure = f"answers with status {response.status_code}: {self._complaint(response)}"
            raise _MayPass(failure, _asked_wait(response))
        if not response.is_success:
            raise self._refusal(response)
        try:
            return from_json(response.content)
        except ValueError as error:  # a body without a length that was cut off ends like a whole one
            raise _MayPass("answers with JSON that is cut off or damaged") from error

    def version(self) -> str | None:
        """Return the version that the server names as vLLM does, next to its API; None where it names none."""
        root = self.config.url.rstrip("/").removesuffix("/v1")
        try:
            response = self._client.get(f"{root}/version")
            content = from_json(response.content) if response.is_success else None
        except (httpx2.RequestError, ValueError):
            return None
        version = content.get("version") if isinstance(content, dict) else None
        return version[:MAX_QUOTED] if isinstance(version, str) else None

    @property
    def _key_setting(self) -> str:
        return f"{self.named_in.rpartition('.')[0]}.api_key_variable"

    def _read_key(self, variable: str | None) -> str | None:
        if variable is None:
            return None
        key = os.environ.get(variable)
        if not key:
            raise InputError(f"{self._key_setting}: the environment variable {variable} is not set")
        hide(key)
        return key

    def _refusal(self, response: httpx2.Response) -> InputError:
        """Return the error for a status that another attempt would not change."""
        status = response.status_code
        if status not in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
            return Refused(self.named_in, self.config.url, status, self._complaint(response))
        key = self.config.api_key_variable
        sent = f"the key in {key}" if key else "requests without a key"
        if not key:
            sent += f"; name its variable in {self._key_setting}"
        return InputError(f"{self.named_in}: {self.config.url} refuses {sent} (status {status})")

    def _complaint(self, response: httpx2.Response) -> str:
        """Return the server's error message on one line, shortened, without the key."""
        try:
            content = from_json(response.content)
        except ValueError:
            content = None
        error = content.get("error", content.get("detail")) if isinstance(content, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        text = redact(" ".join((message if isinstance(message, str) else response.text).split()) or "it does not say why")
        return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."


def pause(stopping: Event, seconds: float) -> None:
    """Wait, but not after `stopping` is set."""
    stopping.wait(seconds)


def _asked_wait(response: httpx2.Response) -> float:
    """Return the seconds that the server asks to wait; 0 if it names none."""
    seconds = response.headers.get("retry-after", "")
    return min(float(seconds), LONGEST_ASKED_WAIT_SECONDS) if seconds.isdecimal() else 0.0

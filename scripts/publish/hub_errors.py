"""What can go wrong on the way to the Hub: given up in time, tried again where that may help, and put into a sentence.

huggingface_hub retries single requests of an upload by itself, but neither the commit nor what comes before it; here whole
steps are tried again. Its messages hold addresses and no tokens, and neither do ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from typing import TypeVar

from httpx2 import Client, HTTPError, Timeout
from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils._http import default_client_factory

from configs.runtime.errors import InputError, first_line

T = TypeVar("T")

FIRST_WAIT_SECONDS = 2.0
CONNECT_SECONDS, SILENCE_SECONDS = 30.0, 300.0  # after which a request counts as lost
AGAIN = "run the same command again: what has arrived is not sent a second time"
# A broken connection, an answer that is no JSON where a proxy or a failing server sends a page; the library wraps some of them.
BREAKS = (HTTPError, OSError, RuntimeError, JSONDecodeError)


@contextmanager
def errors_in_words(api: HfApi, repo_id: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into a sentence, and silence into an error.

    Raises:
        InputError: always in place of an error of the library's, the Hub's or the network's.
    """
    try:
        with _limited_silence():
            yield
    except LocalTokenNotFoundError as error:
        raise InputError(_not_logged_in(api)) from error
    except OfflineModeIsEnabled as error:
        raise InputError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it, or use --dry-run DIR") from error
    except HFValidationError as error:
        raise InputError(f"--repo-id {repo_id}: {first_line(error)}") from error
    except HfHubHTTPError as error:
        raise InputError(_answer_in_words(api, repo_id, error)) from error
    except BREAKS as error:
        raise InputError(
            f"{api.endpoint} or the way there broke off: {_root(error)}; nothing was published, {AGAIN}"
        ) from error
    except InputError:
        raise
    except ValueError as error:
        said = " ".join(str(error).split())
        raise InputError(f"{api.endpoint} did not take what was to be published: {said}; nothing was published") from error


def patiently(step: Callable[[], T], attempts: int) -> T:
    """Return what a step returns, tried again after what may pass: a broken connection, an answer of 500 and above."""
    wait = FIRST_WAIT_SECONDS
    for attempt in range(1, attempts):
        try:
            return step()
        except BREAKS as error:
            if not may_pass(error):
                raise
            print(f"try {attempt} of {attempts} broke off ({_root(error)}); again in {wait:g} s")
        time.sleep(wait)
        wait *= 2
    return step()


@contextmanager
def _limited_silence() -> Iterator[None]:
    """Let a request fail that hears nothing any more; the library by itself would wait for ever."""

    def make() -> Client:
        client = default_client_factory()
        client.timeout = Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        return client

    set_client_factory(make)
    try:
        yield
    finally:
        set_client_factory(default_client_factory)


def may_pass(error: Exception) -> bool:
    """Whether the same might go well a little later: not where the Hub said no."""
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return not isinstance(error, PermissionError)  # of a file here, or xet storage's word for a token that may not


def _not_logged_in(api: HfApi) -> str:
    return (
        f"nobody is logged in to {api.endpoint}, or the token is no longer good: run `hf auth login`, or put a token that may "
        "write into HF_TOKEN"
    )


def _answer_in_words(api: HfApi, repo_id: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status == 401:
        return _not_logged_in(api)
    if status == 403:
        return f"the token in use may not write {repo_id} on {api.endpoint}: take one that may write its owner's repositories"
    if status in (409, 412):
        return moved(repo_id)
    return f"{api.endpoint} answered {status} ({_said(error)}); nothing was published, {AGAIN}"


def unknown(api: HfApi, repo_id: str, error: Exception) -> str:
    """Say that a commit was sent, and that neither its answer nor the repository can be read."""
    return (
        f"{api.endpoint} or the way there broke off at the commit, and again when {repo_id} was to be looked at: "
        f"{_root(error)}; it is not known whether it was published, {AGAIN}"
    )


def moved(repo_id: str) -> str:
    """Say that a repository has another head than it had when the push began."""
    return f"{repo_id} was changed by somebody else while it was pushed to; look at it, and run the command again"


def _said(error: HfHubHTTPError) -> str:
    return error.server_message or error.response.reason_phrase or "without a reason"


def _root(error: BaseException) -> str:
    """Return the cause at the bottom: the library wraps a dropped connection in a sentence on the file."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"

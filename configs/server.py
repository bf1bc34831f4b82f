"""A target on another machine, behind an OpenAI-compatible API: where it is, and how it is to be asked. Imports no torch."""

from __future__ import annotations

import re
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from configs.settings import NonNegativeInt, PositiveFloat, PositiveInt, Settings

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ServerConfig(Settings):
    """A server that is asked for the target's log-probabilities, by token id."""

    url: str  # of the API, such as http://host:8000/v1
    model: str  # what the server calls the target
    api_key_variable: str | None = None  # name of the environment variable that holds the key
    concurrency: PositiveInt = 8  # requests under way at one time, a process
    timeout_seconds: PositiveFloat = 120.0  # of one request
    retries: NonNegativeInt = 5  # further attempts after a failed connection, a timeout, 429 or 5xx
    # Nats: how far the log-probabilities of the server's likeliest tokens may lie from the target's, on average over a few
    # positions. SmolLM2 in vLLM was 0.01 to 0.03 off in bfloat16, rounded to 8 bits 0.03 to 0.07, to 4 bits 0.2 to 0.7.
    probe_tolerance: PositiveFloat = 0.1

    @model_validator(mode="after")
    def _url_is_plain(self) -> Self:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("url must be that of an API, such as http://host:8000/v1")
        # The url is written beside what the server gave; what is secret stays out of it, and out of this sentence.
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("url must hold no user, password or query; name the variable with the key in api_key_variable")
        return self

    @model_validator(mode="after")
    def _the_key_is_named_and_not_given(self) -> Self:
        if self.api_key_variable is not None and not VARIABLE.fullmatch(self.api_key_variable):
            # What stands there may be the key itself, and is not repeated.
            raise ValueError("api_key_variable must be the name of an environment variable, such as SERVER_KEY, not the key")
        return self


class AnswerServerConfig(ServerConfig):
    """A server that is asked for the target's answers."""

    # token_ids: the server says which tokens it wrote (vLLM: return_token_ids). text: it returns text only, which is encoded
    # anew; the tokens may then be others than those written.
    answers_as: Literal["token_ids", "text"] = "token_ids"
    # text: an answer whose tokens, encoded anew, have another text or another number than the server says is dropped and
    # counted, or ends the run.
    on_other_tokens: Literal["drop", "refuse"] = "drop"
    failures_in_a_row: PositiveInt = 5  # so many prompts given up one after the other, each after all its retries, end the run

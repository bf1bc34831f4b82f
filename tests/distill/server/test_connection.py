"""One request: its answer whole, asked for again where the trouble may pass, and the key kept to itself."""

import logging
import time
from contextlib import closing

import pytest

from configs.runtime.errors import InputError
from configs.schema.data import ServerConfig
from distill.server.connection import Connection, GaveUp, Refused


@pytest.fixture
def connect(api, stack):
    def make(**settings):
        given = {"url": api.url, "model": "tiny", "retries": 5, "timeout_seconds": 10.0} | settings
        return stack.enter_context(closing(Connection(ServerConfig(**given))))

    return make


@pytest.fixture
def waits(monkeypatch):
    seconds = []
    monkeypatch.setattr("distill.server.connection.pause", lambda stopping, wait: seconds.append(wait))
    return seconds


MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}


@pytest.mark.parametrize(
    "trouble", ["cut", "cut without length", "reset", "garbage", (408, {}), (429, {}), (500, {}), (529, {})]
)
def test_trouble_that_may_pass_is_waited_out(api, connect, waits, trouble):
    api.troubles = [trouble] * 3
    assert connect().send("GET", "models") == MODELS
    assert len(waits) == 3


def test_an_answer_that_does_not_come_in_time_is_asked_for_again(api, connect, waits):
    api.troubles = ["hang"]
    assert connect(timeout_seconds=0.1).send("GET", "models") == MODELS
    assert len(waits) == 1


def test_waits_grow_and_are_spread_at_random(api, connect, waits):
    api.troubles = [(500, {})] * 41
    with pytest.raises(GaveUp, match="answers with status 500: overloaded; gave up after 41 attempts"):
        connect(retries=40).send("GET", "models")
    means = [min(0.5 * 2**number, 30.0) for number in range(40)]
    assert all(mean / 2 <= wait <= mean * 1.5 for wait, mean in zip(waits, means, strict=True))
    assert len(set(waits[10:])) == 30


@pytest.mark.parametrize(
    ("asked", "least", "most"), [("45", 45, 45), ("9000", 600, 600), ("-5", 0, 1), ("soon", 0, 1), ("", 0, 1)]
)
def test_a_wait_that_the_server_asks_for_is_kept(api, connect, waits, asked, least, most):
    api.troubles = [(429, {"Retry-After": asked})]
    connect().send("GET", "models")
    assert least <= waits[0] <= most


@pytest.mark.parametrize("status", [301, 400, 404, 422])
def test_a_refusal_is_not_asked_about_again(api, connect, waits, status):
    api.troubles = [(status, {})]
    with pytest.raises(Refused, match=rf"refuses a request \(status {status}\): overloaded") as caught:
        connect().send("GET", "models")
    assert (caught.value.status, caught.value.complaint, waits) == (status, "overloaded", [])


@pytest.mark.parametrize("named_in", ["server.url", "target.states.urls"])
def test_only_a_setting_that_there_is_is_named_for_a_key(api, stack, named_in):
    api.troubles = [(401, {})]
    connection = stack.enter_context(closing(Connection(ServerConfig(url=api.url, model="tiny"), named_in)))
    with pytest.raises(InputError, match=rf"{named_in}: .* refuses requests without a key") as caught:
        connection.send("GET", "models")
    assert ("server.api_key_variable" in str(caught.value)) == (named_in == "server.url")


def test_nothing_is_sent_again_once_stopped(api, connect):
    api.troubles = [(500, {})] * 9
    connection = connect()
    connection.stop()
    started = time.monotonic()
    with pytest.raises(GaveUp, match="gave up after 1 attempts"):
        connection.send("GET", "models")
    assert time.monotonic() - started < 0.4


def test_the_version_is_what_the_server_says_beside_its_api_or_none(api, connect):
    assert connect().version() == "1.2.3"
    api.respond = lambda *_: (404, {}, {})
    assert connect().version() is None
    api.respond = lambda *_: "garbage"
    assert connect().version() is None
    api.respond = lambda *_: (200, {}, ["1"])
    assert connect().version() is None


def test_a_key_that_a_server_repeats_is_masked_in_errors_and_in_the_log(api, connect, waits, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SERVER_KEY", "planted-key-7")
    for status in (400, 500):
        api.respond = lambda *_, status=status: (status, {}, {"error": "no planted-key-7 here, planted-key-7"})
        with pytest.raises(InputError, match=r"no \*\*\* here, \*\*\*") as caught:
            connect(api_key_variable="SERVER_KEY", retries=1).send("POST", "completions", {})
        assert "planted-key-7" not in str(caught.value)
    assert "trying again" in caplog.text
    assert "planted-key-7" not in caplog.text

"""One request: its answer whole, asked for again where the trouble may pass, and the key kept to itself."""

import logging

import pytest

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.loading import load_config
from configs.schema.data import DataConfig, ServerConfig
from distill.server.connection import Connection, GaveUp, Refused


@pytest.fixture
def connect(api, stack):
    def make(**settings):
        given = {"url": api.url, "model": "tiny", "retries": 5, "timeout_seconds": 10.0} | settings
        return stack.enter_context(Connection(ServerConfig(**given)))

    return make


@pytest.fixture
def waits(monkeypatch):
    seconds = []
    monkeypatch.setattr("distill.server.connection.pause", lambda stopping, wait: seconds.append(wait))
    return seconds


MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}


@pytest.mark.parametrize(
    "trouble", ["cut", "cut without length", "reset", "garbage", "hang", (408, {}), (429, {}), (500, {}), (529, {})]
)
def test_trouble_that_may_pass_is_waited_out(api, connect, waits, trouble):
    api.troubles = [trouble] * 3
    assert connect(timeout_seconds=0.1 if trouble == "hang" else 10.0).send("GET", "models") == MODELS
    assert len(waits) == 3


def test_waits_grow_and_are_spread_at_random_until_the_attempts_are_used_up(api, connect, waits):
    api.troubles = [(500, {})] * 41
    with pytest.raises(GaveUp, match="overloaded"):
        connect(retries=40).send("GET", "models")
    means = [min(0.5 * 2**number, 30.0) for number in range(40)]
    assert all(mean / 2 <= wait <= mean * 1.5 for wait, mean in zip(waits, means, strict=True))
    assert len(set(waits[10:])) == 30


@pytest.mark.parametrize(("asked", "least", "most"), [("45", 45, 45), ("9000", 600, 600), ("-5", 0, 1), ("soon", 0, 1)])
def test_a_wait_that_the_server_asks_for_is_kept(api, connect, waits, asked, least, most):
    api.troubles = [(429, {"Retry-After": asked})]
    connect().send("GET", "models")
    assert least <= waits[0] <= most


@pytest.mark.parametrize("status", [301, 400, 404])
def test_a_refusal_is_not_asked_about_again(api, connect, waits, status):
    api.troubles = [(status, {})]
    with pytest.raises(Refused, match="overloaded"):
        connect().send("GET", "models")
    assert waits == []


def test_nothing_is_sent_again_once_stopped(api, connect):
    api.troubles = [(500, {})] * 9
    connection = connect()
    connection.stop()
    with pytest.raises(GaveUp, match="gave up after 1 attempts"):
        connection.send("GET", "models")


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


def test_a_model_that_is_not_served_and_an_address_that_is_no_api_are_refused(api, connect):
    assert connect().check_model().id == "tiny"
    with pytest.raises(InputError, match=r"server\.model: .* tiny"):
        connect(model="large").check_model()
    with pytest.raises(InputError, match=r"server\.url"):
        connect(url=api.url.removesuffix("/v1")).models()
    api.name = None
    with pytest.raises(InputError, match=r"server\.url"):
        connect().models()


def test_a_key_is_sent_and_a_wrong_or_missing_one_is_told_apart(api, connect, monkeypatch):
    api.key = "right"
    with pytest.raises(InputError, match=r"refuses requests without one; name its variable in server\.api_key_variable"):
        connect().models()
    monkeypatch.delenv("SERVER_KEY", raising=False)
    with pytest.raises(InputError, match="the environment variable SERVER_KEY is not set"):
        connect(api_key_variable="SERVER_KEY")
    monkeypatch.setenv("SERVER_KEY", "wrong")
    with pytest.raises(InputError, match=r"refuses the key in SERVER_KEY \(status 401\)"):
        connect(api_key_variable="SERVER_KEY").models()
    monkeypatch.setenv("SERVER_KEY", "right")
    connect(api_key_variable="SERVER_KEY").models()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ("url: 'http://h/v1', api_key_variable: hunter2-sk", "api_key_variable"),
        ("url: 'host:8000/v1'", "url"),
        ("url: 'http://host:0/v1'", "url"),
        ("url: 'http://me:hunter2@host'", "url"),
        ("url: 'http://host/v1?key=hunter2'", "url"),
    ],
)
def test_a_secret_in_the_settings_is_refused_and_not_repeated_and_so_is_what_is_no_address(settings, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_config(DataConfig, None, ["answers.written_by=server", f"server={{model: m, {settings}}}"])
    assert "hunter2" not in str(caught.value)

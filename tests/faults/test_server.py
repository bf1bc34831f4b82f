"""A server that cuts the connection or goes away: asked again, named where it goes on, and no answer lost with the process."""

import json
import os
import signal
import socket
import threading

import pytest

from configs.runtime import files
from configs.runtime.command import BAD_INPUT, DONE
from configs.runtime.errors import InputError
from configs.schema.data import DataConfig, ServerConfig
from configs.schema.target import TargetConfig
from distill.generation.make_dataset import make_dataset
from distill.generation.server_answers import ServerAnswerJob
from distill.server import connection as server_connection
from distill.server.connection import Connection
from heads.frozen.loading import load_target
from tests.faults.conftest import kill_at_call, start_pair
from tests.faults.test_making import made
from tests.support.fake_server import Api, serving

BODY = json.dumps({"data": [{"id": "tiny"}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@pytest.fixture
def serve(monkeypatch):
    """A function that serves the list of models, cutting the first `cuts` answers short, and returns the address."""
    monkeypatch.setattr(server_connection, "pause", lambda stopping, seconds: None)
    listeners = []

    def serve(cuts):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def answer():
            for number in range(cuts + 1):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(HEAD + (BODY[: len(BODY) // 2] if number < cuts else BODY))

        threading.Thread(target=answer, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    yield serve
    for listener in listeners:
        listener.close()


def test_an_answer_cut_off_is_asked_for_again_and_one_that_always_is_is_reported(serve):
    with Connection(ServerConfig(url=serve(2), model="tiny", retries=2)) as connection:
        connection.check_model()
    with (
        Connection(ServerConfig(url=serve(3), model="tiny", retries=1)) as connection,
        pytest.raises(InputError, match=r"cannot be reached \(RemoteProtocolError: .*gave up after 2 attempts"),
    ):
        connection.check_model()


# --- a data set whose answers a server writes ---------------------------------------------------------------------


@pytest.fixture
def api(project):
    with serving(Api(load_target(TargetConfig(**project.target)))) as served:
        yield served


@pytest.fixture
def served_data(project, tmp_path, api):
    """A function that gives the config of a data set by the server."""

    def make(name, **settings):
        plain = project.data(tmp_path / name).model_dump()
        server = {"url": api.url, "model": "tiny", "concurrency": 4, "retries": 0, **settings}
        parts = {"answers": plain["answers"] | {"written_by": "server"}, "prompts": plain["prompts"] | {"num_prompts": 16}}
        return DataConfig.model_validate(plain | parts | {"server": server})

    return make


def answers_asked(api):
    return len([body for body in api.asked if "seed" in body])


def test_data_whose_asking_was_killed_again_and_again_ends_with_the_same_bytes(served_data, start, api, tmp_path):
    assert start(make_dataset, served_data("whole")).end() == DONE
    asked = answers_asked(api)
    for plant in (
        kill_at_call(ServerAnswerJob, "_answer", 6),
        kill_at_call(os, "fsync", 5),
        kill_at_call(files, "sync_folder", 1),
    ):
        killed = start(make_dataset, served_data("data"), before=plant)
        assert killed.end() == -signal.SIGKILL, killed.said
        assert not (tmp_path / "data" / "manifest.json").exists()
    resumed = start_pair(start, make_dataset, served_data("data"))
    assert [child.end() for child in resumed] == [DONE, DONE], resumed[0].said
    assert made(tmp_path / "data") == made(tmp_path / "whole")
    # Of each killed run only the answers under way were asked for again.
    assert answers_asked(api) <= 2 * asked + 2 * (4 + 1)


def test_a_server_that_goes_away_ends_the_command_with_one_sentence_and_code_2(served_data, start, api, tmp_path):
    plain = api.respond
    api.respond = lambda *asked: plain(*asked) if answers_asked(api) < 8 else "reset"
    gone = start(make_dataset, served_data("data"))
    assert gone.end() == BAD_INPUT, gone.said
    (line,) = [line for line in gone.said.splitlines() if line.startswith("error: ")]
    assert "gave up after 1 attempts" in line
    assert "rerun the same command to resume" in line
    assert "Traceback" not in gone.said
    asked = answers_asked(api)
    [pieces] = (tmp_path / "data").glob(".answers.partial-*")
    assert len(pieces.read_text().splitlines()) == 1 + asked
    api.respond = plain
    assert start(make_dataset, served_data("data")).end() == DONE
    assert answers_asked(api) == 16  # none of them a second time

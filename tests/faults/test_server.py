"""A server that cuts the connection in the middle of its answer: asked again, and named where it goes on."""

import json
import socket
import threading

import pytest

from configs.errors import InputError
from configs.serving import ServerConfig
from distill import server_connection
from distill.server import TargetServer

BODY = json.dumps({"data": [{"id": "tiny"}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@pytest.fixture
def serve(monkeypatch):
    """A function that serves the list of models, cutting the first `cuts` answers short, and returns the address."""
    monkeypatch.setattr(server_connection, "pause", lambda stopping, seconds: None)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(cuts):
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
    listener.close()


def test_an_answer_cut_off_is_asked_for_again(serve):
    with TargetServer(ServerConfig(url=serve(2), model="tiny", retries=2)) as connection:
        connection.check_model()


def test_answers_that_are_always_cut_off_are_reported(serve):
    with (
        TargetServer(ServerConfig(url=serve(3), model="tiny", retries=1)) as connection,
        pytest.raises(InputError, match=r"cannot be reached \(RemoteProtocolError: .*gave up after 2 attempts"),
    ):
        connection.check_model()

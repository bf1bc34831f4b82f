"""Dry runs of `draftsmith push`, which must not touch the network."""

import socket

import pytest

from configs.runtime.command import DONE


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Opening a connection fails."""

    def refuse(*arguments):
        raise AssertionError("a dry run touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def dry(push, tmp_path, no_network):
    """A function that makes a dry run; returns the folder, or code and complaint where there is none."""

    def run(*more, **options):
        code, out, err = push("--dry-run", str(tmp_path / "dry"), *more, **options)
        return tmp_path / "dry" if code == DONE else (code, out, err)

    return run

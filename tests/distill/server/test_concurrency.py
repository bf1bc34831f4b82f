"""Many requests at a time: never more than allowed, every answer kept, and an end where the server is gone."""

import threading
import time
from contextlib import closing

import pytest

from configs.runtime.errors import InputError
from configs.schema.data import ServerConfig
from distill.server.concurrency import ask_all, naming
from distill.server.connection import Connection, GaveUp


@pytest.fixture
def connection(stack):
    def make(concurrency=3):
        made = Connection(ServerConfig(url="http://127.0.0.1:9/v1", model="m", concurrency=concurrency))
        return stack.enter_context(closing(made))

    return make


def names(count):
    return {str(number): number for number in range(count)}


def failing(numbers):
    """Return what asks for a number, and gives up those named."""

    def ask(number):
        if number in numbers:
            with naming(f"number {number}"):
                raise GaveUp("no answer")
        return number * number

    return ask


def collect(connection, items, ask, limit=3):
    kept = {}
    try:
        ask_all(connection, items, ask, kept.__setitem__, failures_in_a_row=limit)
    except InputError as error:
        return kept, str(error)
    return kept, None


def test_no_more_are_under_way_than_allowed_and_as_many_as_allowed(connection):
    together, lock, counts = threading.Barrier(4), threading.Lock(), {"now": 0, "most": 0}

    def ask(number):
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts.values())
        together.wait(5)
        with lock:
            counts["now"] -= 1

    collect(connection(4), names(12), ask)
    assert counts == {"now": 0, "most": 4}


def test_failures_between_answers_leave_the_others_at_work_and_are_named_at_the_end(connection):
    kept, said = collect(connection(1), names(20), failing(range(0, 20, 2)))
    assert kept == {str(number): number**2 for number in range(1, 20, 2)}
    assert said == (
        "10 of 20 requests were given up, the first for number 0: no answer; the answers so far are kept; "
        "rerun the same command to resume"
    )


def test_so_many_in_a_row_end_the_work_and_what_came_is_kept(connection):
    asked = []

    def ask(number):
        asked.append(number)
        time.sleep(0.01)
        return failing(range(4, 100))(number)

    kept, said = collect(connection(1), names(50), ask, limit=3)
    assert sorted(kept) == ["0", "1", "2", "3"]
    assert "3 requests in a row (server.failures_in_a_row) were given up, the last for number 6: no answer" in said
    assert len(asked) < 25


def test_requests_under_way_are_not_sent_again_once_the_work_has_ended(connection):
    # One fails for good, the other waits for its next attempt, for half a minute if it were left alone.
    way = connection(2)

    def ask(number):
        if number == 0:
            raise InputError("refused")
        way._stopping.wait(30)
        raise GaveUp("stopped waiting")

    started = time.monotonic()
    assert collect(way, names(2), ask) == ({}, "refused")
    assert time.monotonic() - started < 5


def test_an_interrupt_keeps_what_came(connection):
    kept, asked = {}, []

    def ask(number):
        asked.append(number)
        time.sleep(0.01)
        return number

    def keep(name, answer):
        kept[name] = answer
        if len(kept) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_all(connection(2), names(50), ask, keep, failures_in_a_row=3)
    assert sorted(kept.values()) == sorted(asked)
    assert len(asked) < 50

"""What every test of generation needs."""

import itertools
import logging
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState

from configs.runtime import terminal
from distill.generation import answers, self_seeding, steering


@pytest.fixture(autouse=True)
def fresh_process_state():
    """Leave no process state behind: accelerate keeps the first one for the life of the process."""
    yield
    PartialState._reset_state()


@pytest.fixture
def writing(monkeypatch, caplog):
    """A function that runs work in which a stand-in for the target writes texts of random lengths, a step of which takes time.

    It returns after how many seconds each line of progress came, the seconds left by that line, and the seconds in all.
    """
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now

    class Writer:
        """Writes "a" up to an end of the text, which few reach at their limit."""

        device = torch.device("cpu")

        def __init__(self, target, *_, **__):
            self.end = min(target.eos_token_ids)

        def draw(self, rows, rng):
            clock.now += 0.05 + 0.0005 * sum(len(row.tokens) for row in rows)
            return [[self.end if len(row.written) >= self.length(row) else ord("a")] for row in rows]

        def length(self, row):
            return random.Random(row.request).lognormvariate(math.log(0.25 * (row.limit - len(row.prompt_ids))), 0.8)

        start = keep_rows = put_rows = lambda self, *_: None

        def has_room(self, row):
            return True

    class Lines(logging.Handler):
        def emit(self, record):
            if (found := re.search(r"(\d+):(\d+):(\d+) left", record.getMessage())) is not None:
                hours, minutes, seconds = map(int, found.groups())
                lines.append((clock.now, 3600 * hours + 60 * minutes + seconds))

    lines = []

    def run(work):
        monkeypatch.setattr(terminal, "time", clock)
        for module in (answers, self_seeding, steering):
            monkeypatch.setattr(module, "TargetSource", Writer)
        handler = Lines()
        monkeypatch.setattr(terminal.LOGGER, "handlers", [handler])
        with caplog.at_level(logging.INFO, logger=terminal.LOGGER.name):
            work()
        return lines, clock.now

    return run


@pytest.fixture
def check_estimates():
    """A function that holds lines of progress to the truth: they come steadily, and from a tenth on the time left is near."""

    def check(lines, total):
        came = [0.0, *(now for now, _ in lines), total]
        assert max(after - before for before, after in itertools.pairwise(came)) < 1.5 * terminal.SECONDS_BETWEEN_LINES
        print([(round(now / total, 2), round(left / (total - now), 2)) for now, left in lines])
        ratios = [(now / total, left / (total - now)) for now, left in lines[:-1]]
        assert 1 / 1.5 < next(ratio for share, ratio in ratios if share > 0.1) < 1.5
        assert all(1 / 2 < ratio < 2 for share, ratio in ratios if 0.1 < share < 0.7)

    return check

"""A run under way, for those who look in."""

import pytest

from tests.support.watched_runs import WatchedRun


@pytest.fixture
def run(tmp_path):
    """A run in its training."""
    run = WatchedRun(tmp_path / "run")
    run.end("data")
    run.begin("train")
    run.train_some({10: 4.0, 20: 3.0}, {10: 1.5, 20: 2.25})
    return run

"""What every test of generation needs."""

import pytest
from accelerate import PartialState


@pytest.fixture(autouse=True)
def fresh_process_state():
    """Leave no process state behind: accelerate keeps the first one for the life of the process."""
    yield
    PartialState._reset_state()

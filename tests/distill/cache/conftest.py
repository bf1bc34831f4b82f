"""What every test of caches needs."""

import pytest

from tests.support.caches import write_rows


@pytest.fixture
def data_file(tmp_path, conversations):
    return write_rows(tmp_path / "train.jsonl", conversations)

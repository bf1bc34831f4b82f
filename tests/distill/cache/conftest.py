"""What every test of caches needs."""

import pytest

from tests.support.caches import cache_job, random_conversations, write_rows

VOCABULARY = 258  # of the byte target


@pytest.fixture(scope="module")
def conversations():
    """Twelve conversations of random tokens, prompts of 3 to 8 of them, answers of 1 to 40."""
    return random_conversations([(3 + n % 6, 1 + (n * 17) % 40) for n in range(12)], VOCABULARY, seed=5)


@pytest.fixture
def job(tmp_path, data_file, conversations, byte_target):
    """A function that gives the job of making a cache of those conversations."""

    def make(output="cache", **settings):
        values = {"batch_size": 3, "dtype": "float32", "shard_megabytes": 0.008} | settings
        return cache_job(byte_target, data_file, conversations, tmp_path / output, **values)

    return make


@pytest.fixture
def data_file(tmp_path, conversations):
    return write_rows(tmp_path / "train.jsonl", conversations)

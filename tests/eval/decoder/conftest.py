"""The target of most of these tests, and a draft LM that is sometimes right."""

import pytest

from heads.proposers.draft_lm import DraftLM


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


@pytest.fixture
def draft(tiny_llama):
    return DraftLM(tiny_llama(seed=1, spread=5.5), 64)

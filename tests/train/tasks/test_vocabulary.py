"""The draft vocabulary is made of what the target answers with, and of what ends an answer."""

import logging

import pytest

from configs.runtime.errors import ConfigError
from tests.support.caches import conversation
from train.resolve import most_frequent_answer_tokens


@pytest.fixture
def target(tiny_llama, as_target):
    return as_target(tiny_llama(layers=1), eos=(1, 2))


ROWS = [conversation((50, 50, 50, 50), (40, 9, 9, 33)), conversation((51,), (40, 9, 33, 20, 12))]


def test_the_most_frequent_answer_tokens_are_taken_and_ties_go_to_the_lower_id(target, caplog):
    with caplog.at_level(logging.INFO, logger="draftsmith"):
        chosen = most_frequent_answer_tokens(ROWS, 6, target)
    # 9 comes three times, 33 and 40 twice; of 12 and 20, once each, one fits. Prompt tokens do not count; 1 and 2 end answers.
    assert chosen.token_ids_W.tolist() == [1, 2, 9, 12, 33, 40]
    assert chosen.target_vocab_size == 64
    assert "6 of 64 tokens, 88.89 %" in caplog.text


@pytest.mark.parametrize("size", [1, 65])
def test_a_size_that_cannot_be_is_refused_with_what_can(target, size):
    with pytest.raises(ConfigError, match=rf"^draft_vocab_size: expected 2 .* to 64 .*, got {size}"):
        most_frequent_answer_tokens(ROWS, size, target)

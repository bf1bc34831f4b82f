"""The loop that writes text: where rows end, who takes their place, and the distribution of what the target draws."""

import pytest
import torch

from configs.schema.decoding import SamplingConfig
from distill.generation.continuation import TargetSource, TokenRow, continue_rows
from heads.sampling.probabilities import token_probabilities
from tests.support.writing import continue_tokens


class Counting:
    """A source that counts on from each row's last token, `stride` tokens a step, and notes the rows of each step."""

    device = torch.device("cpu")

    def __init__(self, stride):
        self.stride, self.steps, self.batch, self.room, self.put = stride, [], None, 99, []

    def start(self, rows):
        self.batch = len(rows)

    def draw(self, rows, rng):
        assert len(rows) == len(rng.requests) == self.batch
        assert [row.request for row in rows] == rng.requests
        self.steps.append([row.key for row in rows])
        return [[row.tokens[-1] + step for step in range(1, self.stride + 1)] for row in rows]

    def keep_rows(self, places):
        self.batch = len(places)

    def has_room(self, row):
        return row.limit < self.room

    def put_rows(self, places, rows):
        self.put.append((list(places), [row.key for row in rows]))


def rows_of(*limits):
    return [TokenRow(key=n, prompt_ids=(0, 10 * n), limit=limit, request=100 + n) for n, limit in enumerate(limits)]


def ends_with_3(row):
    return row.tokens[-1] % 10 == 3


def test_rows_end_at_their_end_token_or_limit_also_in_the_middle_of_a_step():
    rows = rows_of(9, 3, 9)
    list(continue_rows(Counting(2), rows, seed=0, has_ended=ends_with_3))
    assert [row.written for row in rows] == [[1, 2, 3], [11], [21, 22, 23]]


def test_waiting_rows_take_the_places_of_those_that_have_ended():
    source = Counting(1)
    ended = [row.key for row in continue_rows(source, rows_of(9, 3, 4, 3), seed=0, has_ended=ends_with_3, batch_size=2)]
    assert ended == [1, 0, 2, 3]
    assert source.steps == [[0, 1], [0, 2], [0, 2], [3]]
    assert source.put == [([1], [2]), ([0], [3])]


def test_a_row_that_the_batch_has_no_room_for_begins_the_next_one_and_none_is_lost():
    source = Counting(1)
    source.room = 5
    ended = [row.key for row in continue_rows(source, rows_of(9, 3, 8, 4), seed=0, has_ended=ends_with_3, batch_size=2)]
    assert ended == [1, 0, 3, 2]
    assert source.steps == [[0, 1], [0], [0], [2, 3], [2, 3], [2]]
    assert source.put == []


def test_sampled_tokens_follow_the_distribution(byte_target):
    prompt = byte_target.encode_chat([{"role": "user", "content": "hi"}])
    sampling = SamplingConfig(temperature=0.5, top_k=4)
    draws = continue_tokens(byte_target, [prompt] * 2000, sampling, max_new_tokens=1, seed=0, requests=list(range(2000)))
    probs_V = token_probabilities(byte_target.model(torch.tensor([prompt])).logits[0, -1], sampling)
    counted_V = torch.bincount(torch.tensor(draws).flatten(), minlength=probs_V.numel()) / 2000
    assert set(counted_V.nonzero().flatten().tolist()) <= set(probs_V.nonzero().flatten().tolist())
    assert (counted_V - probs_V).abs().sum() / 2 < 0.05


def test_logits_that_are_not_finite_are_reported(byte_target, monkeypatch):
    monkeypatch.setattr(
        "distill.generation.continuation.head_logits", lambda model, hidden: torch.full((len(hidden), 4), torch.nan)
    )
    with pytest.raises(RuntimeError, match=r"not finite in torch\.float32"):
        continue_tokens(byte_target, [[1]], SamplingConfig(), max_new_tokens=1, seed=0, requests=[0])


def test_a_place_that_holds_a_rows_prompt_reads_no_other_and_the_row_gets_the_tokens_of_its_own(
    tiny_llama, as_target, monkeypatch
):
    target = as_target(tiny_llama(seed=4, dtype=torch.float32))
    read = []
    plain = TargetSource._read_prompts
    monkeypatch.setattr(
        TargetSource,
        "_read_prompts",
        lambda self, cache, prompts, rows: read.append(len(rows)) or plain(self, cache, prompts, rows),
    )

    def written(batch_size, prompts):
        rows = [TokenRow(key=n, prompt_ids=ids, limit=8 + n % 3, request=n) for n, ids in enumerate(prompts)]
        source = TargetSource(target, SamplingConfig(temperature=1.0), capacity=16)
        list(continue_rows(source, rows, seed=0, has_ended=lambda row: False, batch_size=batch_size))
        return [row.written for row in rows]

    alike = [(5, 9, 6)] * 6
    together = written(None, alike)
    read.clear()
    assert written(2, alike) == together
    assert read == [2]  # those of the first two rows
    others = [(5, 9, 6), (7, 8), (5, 9, 6), (5, 9, 6)]
    assert written(2, others) == written(None, others)

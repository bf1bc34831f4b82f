"""The loop that writes text: where rows end, who takes their place, and the distribution of what the target draws."""

import pytest
import torch

from configs.schema.decoding import SamplingConfig
from distill.generation.continuation import Request, continue_requests
from heads.sampling.draws import token_probabilities
from tests.support.writing import continue_tokens


class Counting:
    """A source that counts on from each row's last token, `stride` tokens a step, and notes the rows of each step."""

    device = torch.device("cpu")

    def __init__(self, stride=1, room=99):
        self.stride, self.room, self.steps, self.put = stride, room, [], []

    def start(self, slots):
        self.batch = len(slots)

    def draw(self, slots, rng):
        assert len(slots) == len(rng.requests) == self.batch
        assert [each.number for each in slots] == rng.requests
        self.steps.append([each.number for each in slots])
        return [[each.tokens[-1] + step for step in range(1, self.stride + 1)] for each in slots]

    def keep_rows(self, places):
        self.batch = len(places)

    def has_room(self, request):
        return request.limit < self.room

    def put_rows(self, places, requests):
        self.put.append((list(places), [each.number for each in requests]))


def written_by(source, limits, batch_size=None, then=None):
    """Return what is written in the order in which texts end; text 0 asks for another one, where `then` is its limit."""
    found = {}

    def request(number, limit):
        def done(written):
            found[number] = written
            return request(len(limits), then) if number == 0 and then is not None else None

        def has_ended(request):
            return request.tokens[-1] % 10 == 3

        return Request(prompt_ids=(0, 10 * number), limit=limit, number=number, has_ended=has_ended, on_done=done)

    continue_requests(source, (request(*each) for each in enumerate(limits)), seed=0, batch_size=batch_size)
    return found


def test_texts_end_at_their_end_token_or_limit_also_in_the_middle_of_a_step():
    assert written_by(Counting(2), (9, 3, 9)) == {0: [1, 2, 3], 1: [11], 2: [21, 22, 23]}


def test_waiting_requests_take_the_slots_of_texts_that_have_ended():
    source = Counting()
    assert list(written_by(source, (9, 3, 4, 3), batch_size=2)) == [1, 0, 2, 3]
    assert source.steps == [[0, 1], [0, 2], [0, 2], [3]]
    assert source.put == [([1], [2]), ([0], [3])]


def test_what_a_text_asks_next_goes_before_new_requests():
    source = Counting()
    assert list(written_by(source, (3, 9, 3, 3), batch_size=2, then=4)) == [0, 4, 1, 2, 3]
    assert source.steps == [[0, 1], [4, 1], [4, 1], [2, 3]]


def test_a_request_that_the_batch_has_no_room_for_begins_the_next_one_and_none_is_lost():
    source = Counting(room=5)
    assert list(written_by(source, (9, 3, 8, 4), batch_size=2)) == [1, 0, 3, 2]
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
    with pytest.raises(RuntimeError, match=r"target\.dtype"):
        continue_tokens(byte_target, [[1]], SamplingConfig(), max_new_tokens=1, seed=0, requests=[0])

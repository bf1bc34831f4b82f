"""What a server is asked to write, and what its answer comes to: the ids that it wrote, or a sentence."""

import pytest

from configs.runtime.errors import InputError
from configs.schema.data import AnswerServerConfig
from configs.schema.decoding import SamplingConfig
from distill.generation.answers import NO_ROOM
from distill.generation.server_answers import ServerWriter, read_ids
from distill.server.connection import GaveUp
from distill.server.logprobs import TargetServer
from distill.server.responses import read_completion

ENDS = (9, 7)
GREEDY = SamplingConfig()


@pytest.fixture
def writer(api, byte_target, stack):
    """A function that gives a writer over the fake server; settings go to its config."""

    def make(sampling=GREEDY, seed=3, max_positions=160, **settings):
        config = AnswerServerConfig(**{"url": api.url, "model": "tiny", "retries": 0, "timeout_seconds": 10.0, **settings})
        server = stack.enter_context(TargetServer(config))
        return ServerWriter(
            server=server, config=config, target=byte_target, sampling=sampling, seed=seed, max_positions=max_positions
        )

    return make


@pytest.fixture
def prompt(byte_target):
    return byte_target.encode_chat([{"role": "user", "content": "hello"}])


def completion(**choice):
    return read_completion({"choices": [choice]}, "the server")


def test_every_setting_of_the_sampling_is_sent(writer, api, prompt):
    writer(SamplingConfig(temperature=0.7, top_k=40, top_p=0.9)).write(prompt, 5, 20)
    writer().write(prompt, 5, 20)
    sampled, greedy = api.asked
    assert sampled["prompt"] == prompt
    assert (sampled["temperature"], sampled["top_k"], sampled["top_p"]) == (0.7, 40, 0.9)
    assert (greedy["temperature"], greedy["top_k"], greedy["top_p"]) == (0.0, -1, 1.0)
    off = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: sampled[name] for name in off} == off
    assert (sampled["max_tokens"], sampled["model"], sampled["stop_token_ids"]) == (20, "tiny", list(api.target.eos_token_ids))


def test_a_requests_seed_is_its_own_and_the_same_in_every_run(writer, api, prompt):
    for seed, request in ((3, 5), (3, 5), (3, 6), (4, 5)):
        writer(seed=seed).write(prompt, request, 4)
    first, again, other_request, other_seed = [body["seed"] for body in api.asked]
    assert first == again
    assert len({first, other_request, other_seed}) == 3
    assert all(0 <= body["seed"] < 2**31 for body in api.asked)


def test_no_more_is_asked_for_than_the_context_holds(writer, api, prompt):
    writer(max_positions=len(prompt) + 6).write(prompt, 5, 20)
    assert [body["max_tokens"] for body in api.asked] == [6]
    assert writer(max_positions=len(prompt)).write(prompt, 5, 20).answer == NO_ROOM
    assert len(api.asked) == 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"finish_reason": "content_filter"}, "for another reason than its end or its length: finish_reason 'content_filter'"),
        ({"prompt_token_ids": [1, 2]}, "read other token ids than were sent"),
        ({"token_ids": None}, "answers without token ids: it does not know return_token_ids"),
        ({"token_ids": [258]}, "token id 258 lies outside the target's vocabulary of 258"),
        ({"token_ids": "abc"}, r"in a form that is not known here: choices\.0\.token_ids"),
    ],
)
def test_an_answer_that_cannot_be_right_is_refused(writer, api, prompt, change, complaint):
    def spoil(answer, asked):
        answer["choices"][0].update(change)
        return answer

    api.spoil = spoil
    with pytest.raises(InputError, match=complaint):
        writer().write(prompt, 5, 20)


@pytest.mark.parametrize("reason", [None, "abort", "error"])
def test_an_answer_that_the_server_broke_off_may_be_asked_for_again(writer, api, prompt, reason):
    def spoil(answer, asked):
        answer["choices"][0]["finish_reason"] = reason
        return answer

    api.spoil = spoil
    with pytest.raises(GaveUp, match="broke an answer off"):
        writer().write(prompt, 5, 20)


def test_a_refused_request_is_named_by_its_size(writer, api, prompt):
    api.troubles = [(400, {})]
    with pytest.raises(InputError, match=rf"refuses to continue {len(prompt)} tokens by at most 20 \(status 400\): overloaded"):
        writer().write(prompt, 5, 20)


@pytest.mark.parametrize(
    ("token_ids", "finish", "expected"),
    [
        ([1, 2, 3, 4], "length", [1, 2, 3, 4]),
        ([1, 2, 9], "stop", [1, 2, 9]),
        ([1, 7, 3, 4], "length", [1, 7]),  # a server that does not stop where it was told to
        ([1, 2, 3, 9], "length", [1, 2, 3, 9]),
        ([9], "stop", [9]),
    ],
)
def test_ids_go_up_to_the_end_of_the_answer(token_ids, finish, expected):
    answer = completion(token_ids=token_ids, finish_reason=finish)
    assert read_ids(answer, 4, ENDS, 20, "the server") == expected


@pytest.mark.parametrize(
    ("token_ids", "finish", "complaint"),
    [
        ([1, 2], "stop", r"its last token id \(2\) ends no answer of the target \(9, 7\)"),
        ([], "stop", r"its last token id \(none\) ends no answer"),
        ([1, 2], "length", "cut an answer off after 2 tokens where 4 were asked for"),
        ([1, 2, 3, 4, 5], "length", "wrote 5 tokens where at most 4 were asked for"),
        ([1, 2, 3, 4, 9], "stop", "wrote 5 tokens where at most 4 were asked for"),
        ([-1, 9], "stop", "token id -1 lies outside"),
    ],
)
def test_ids_that_cannot_be_right_are_refused(token_ids, finish, complaint):
    with pytest.raises(InputError, match=complaint):
        read_ids(completion(token_ids=token_ids, finish_reason=finish), 4, ENDS, 20, "the server")

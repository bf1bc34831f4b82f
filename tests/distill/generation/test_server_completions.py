"""What a server is asked to write, and what its answer comes to: the ids that it wrote, or a sentence."""

import dataclasses

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.data import AnswerServerConfig
from configs.schema.decoding import SamplingConfig
from distill.generation.answers import NO_ROOM
from distill.generation.server_check import check_writes
from distill.generation.server_completions import OTHER_TOKENS, ServerWriter, closing_id, read_ids, read_text
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
    usage = {"completion_tokens": choice.pop("counted")} if "counted" in choice else None
    return read_completion({"choices": [choice], "usage": usage}, "the server")


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
        ({"token_ids": None}, "answers without token ids: it knows no return_token_ids"),
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


# --- token ids ----------------------------------------------------------------------------------------------------


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


# --- text ---------------------------------------------------------------------------------------------------------


def of_text(target, prompt, text, finish, counted=None, max_tokens=6):
    counts = {} if counted is None else {"counted": counted}
    return read_text(completion(text=text, finish_reason=finish, **counts), prompt, max_tokens, target, "the server")


def test_text_becomes_ids_and_the_end_is_put_back_exactly_where_the_answer_ended(byte_target, prompt):
    letters = byte_target.tokenizer("abc", add_special_tokens=False)["input_ids"]
    [end] = byte_target.eos_token_ids
    assert of_text(byte_target, prompt, "abc", "stop", counted=4) == [*letters, end]
    assert of_text(byte_target, prompt, "abc", "length", counted=3, max_tokens=3) == letters
    assert of_text(byte_target, prompt, "abc<|im_end|>", "stop", counted=4) == [*letters, end]
    assert of_text(byte_target, prompt, "", "stop", counted=1) == [end]
    assert of_text(byte_target, prompt, "abc", "stop") == [*letters, end]


@pytest.mark.parametrize(
    ("text", "finish", "counted"),
    [
        ("abc", "stop", 3),  # two letters in one token, as far as the server is concerned
        ("abc", "stop", 5),
        ("ab�", "stop", 4),  # a broken character has other bytes than its stand-in
        ("abc", "length", 6),
        ("abcdefg", "stop", None),
        ("abc", "length", None),
    ],
)
def test_text_with_other_tokens_than_were_written_is_told(byte_target, prompt, text, finish, counted):
    assert of_text(byte_target, prompt, text, finish, counted) == OTHER_TOKENS


def test_text_cut_off_too_early_or_missing_is_refused(byte_target, prompt):
    with pytest.raises(InputError, match="cut an answer off after 3 tokens where 6 were asked for"):
        of_text(byte_target, prompt, "abc", "length", counted=3)
    with pytest.raises(InputError, match="answers without text"):
        of_text(byte_target, prompt, None, "stop")


def test_text_that_joins_with_the_prompt_is_told(byte_target, prompt):
    class Joining:
        """A tokenizer whose last token of the prompt swallows what follows."""

        def __call__(self, text, **_):
            return {"input_ids": [*prompt[:-1], 1, 2]}

        def decode(self, ids):
            return byte_target.tokenizer.decode(ids)

    target = dataclasses.replace(byte_target, tokenizer=Joining())
    assert of_text(target, prompt, "abc", "stop", counted=4) == OTHER_TOKENS


def write_letters(api, letters="a"):
    """Make the server write letters, as many tokens as asked for by its own count."""

    def spoil(answer, asked):
        answer["choices"][0].update(text=letters * asked["max_tokens"], finish_reason="length")
        answer["usage"]["completion_tokens"] = asked["max_tokens"]
        return answer

    api.spoil = spoil


def test_a_server_without_token_ids_is_asked_for_text(writer, api, byte_target, prompt):
    api.knows_token_ids = False
    write_letters(api)
    [letter] = byte_target.tokenizer("a", add_special_tokens=False)["input_ids"]
    assert writer(answers_as="text").write(prompt, 5, 20).answer == [letter] * 20
    assert api.asked[0]["skip_special_tokens"] is False


def test_the_token_that_closes_an_answer_is_the_chat_templates(byte_target):
    [end] = byte_target.eos_token_ids
    assert closing_id(byte_target) == end
    several = dataclasses.replace(byte_target, eos_token_ids=(0, end))
    assert closing_id(several) == end
    with pytest.raises(InputError, match=r"several end-of-text tokens \(0, 1\)"):
        closing_id(dataclasses.replace(byte_target, eos_token_ids=(0, 1)))


# --- the probe by writing -----------------------------------------------------------------------------------------


def test_the_probe_is_nothing_for_what_the_target_itself_writes(writer, prompt, caplog):
    caplog.set_level("INFO", logger="draftsmith")
    check_writes(writer(probe_tolerance=1e-9), [prompt])  # by token ids: text of this target can mostly not be read back
    assert "up to 0 nats a token" in caplog.text


def test_the_probe_measures_what_the_target_loses_by_the_servers_tokens(writer, api, byte_target, prompt, caplog):
    write_letters(api)
    [letter] = byte_target.tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[*prompt, *[letter] * 32]])
    probs_TV = byte_target.model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    expected = float((probs_TV.max(-1).values - probs_TV[:, letter]).mean())
    with pytest.raises(InputError, match=rf"its greedy answer lies {expected:.3g} nats a token below .* allows 0\.1"):
        check_writes(writer(answers_as="text"), [prompt])
    caplog.set_level("INFO", logger="draftsmith")
    check_writes(writer(answers_as="text", probe_tolerance=50.0), [prompt])
    assert f"up to {expected:.3g} nats a token" in caplog.text


def test_a_server_whose_text_can_never_be_read_is_refused(writer, api, prompt):
    write_letters(api, "ab")
    with pytest.raises(InputError, match="answered 2 prompts with text that, encoded anew, has other tokens"):
        check_writes(writer(answers_as="text"), [prompt, prompt])

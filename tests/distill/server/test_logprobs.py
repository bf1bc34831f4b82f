"""A server's log-probabilities enter a cache only where they are the target's; anything else is refused in one sentence."""

import json
import math

import pytest
import torch

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.loading import load_config
from configs.schema.data import CacheConfig, ServerConfig
from configs.schema.target import TargetConfig
from distill.cache.format import read_places
from distill.cache.reader import open_cache
from distill.cache.server_rows import ROUNDING, log_tail
from distill.cache.storage import Folder
from distill.cache.writer import make_cache
from distill.dataset.batches import Example
from distill.server.logprobs import TargetServer
from tests.support.caches import cache_job, interrupt_after, random_conversations, run, write_rows

VOCABULARY = 258  # of the byte target
K = 5


@pytest.fixture
def connect(api, stack):
    """A function that connects to it, without patience unless asked for."""

    def make(**settings):
        given = {"url": api.url, "model": "tiny", "retries": 0, "timeout_seconds": 10.0} | settings
        return stack.enter_context(TargetServer(ServerConfig(**given)))

    return make


@pytest.fixture(scope="module")
def conversations():
    """Eight conversations of random tokens, prompts of 3 to 7 of them, answers of 1 to 36."""
    return random_conversations([(3 + n % 5, 1 + 5 * n) for n in range(8)], VOCABULARY, seed=7)


@pytest.fixture
def data_file(tmp_path, conversations, byte_target):
    path = tmp_path / "data" / "train.jsonl"
    path.parent.mkdir()
    write_rows(path, conversations)
    manifest = {"format_version": 1, "target": byte_target.identity.to_dict()}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.fixture
def job(tmp_path, data_file, conversations, byte_target, connect):
    """A function that gives the job of making a top-k cache, through a server or, with None, without one."""

    def make(output="cache", server=None, k=K, **settings):
        settings |= {"kind": "top_k", "k": k, "dtype": "float32"}
        return cache_job(byte_target, data_file, conversations, tmp_path / output, server, **settings)

    return make


def rows_of(folder, data_file, target, conversations):
    lengths = [len(row.answer_ids) for row in conversations]
    return open_cache(folder, data_file, target).rows(range(len(lengths)), lengths)


EXAMPLE = Example((5, 6, 7, 8, 9, 10, 11), 3)


# --- what a cache says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, K, VOCABULARY])
def test_a_server_of_the_target_gives_the_targets_own_cache(job, connect, tmp_path, data_file, conversations, byte_target, k):
    run(job("served", connect(), k=k))
    run(job("local", k=k))
    served, local = (rows_of(tmp_path / name, data_file, byte_target, conversations) for name in ("served", "local"))
    assert torch.equal(served["token_ids"], local["token_ids"])
    torch.testing.assert_close(served["log_probs"], local["log_probs"], rtol=0, atol=1e-5)
    torch.testing.assert_close(served["log_tail"], local["log_tail"], rtol=0, atol=1e-4)


def test_the_whole_command_writes_a_cache_that_names_its_server_and_keeps_the_key_to_itself(
    api, tmp_path, data_file, byte_target, byte_target_folder, monkeypatch
):
    api.key = "s3cret-key"
    monkeypatch.setenv("SERVER_KEY", api.key)
    config = CacheConfig(
        target=TargetConfig(name=str(byte_target_folder), dtype="float32", device="cpu"),
        data=str(data_file),
        output=str(tmp_path / "cache"),
        kind="top_k",
        k=K,
        server=ServerConfig(url=api.url, model="tiny", api_key_variable="SERVER_KEY"),
    )
    make_cache(config)
    manifest = open_cache(tmp_path / "cache", data_file, byte_target).manifest
    assert manifest.server is not None
    assert (manifest.server.url, manifest.server.model) == (api.url, "tiny")
    assert not [path for path in (tmp_path / "cache").iterdir() if api.key.encode() in path.read_bytes()]


def test_a_cut_off_run_asks_for_what_is_missing_and_for_the_probe(job, api, connect, tmp_path, monkeypatch):
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(job(server=connect(), shard_megabytes=0.0005))
    api.asked.clear()
    other_address = api.url.replace("127.0.0.1", "localhost")
    again = job(server=connect(url=other_address), shard_megabytes=0.0005)
    places = read_places(Folder(tmp_path / "cache"), run(again))
    missing = int((places.shard_C >= 2).sum())
    assert 0 < missing < 8
    assert len(api.asked) == missing + 1


def test_shards_of_another_model_or_of_the_target_itself_are_not_gone_on_with(job, api, connect):
    run(job())
    assert job(server=connect()).finished() == set()
    run(job(server=connect()))
    assert job(server=connect()).finished() != set()
    assert job(server=connect(model="other")).finished() == set()


def test_a_tail_is_what_is_left_to_one_and_never_less_than_rounding():
    log_probs = torch.tensor([[0.5, 0.25], [1.0, 2e-8]], dtype=torch.float64).log()
    assert log_tail(log_probs, VOCABULARY).exp().tolist() == pytest.approx([0.25, ROUNDING])
    assert log_tail(log_probs, 2).tolist() == [-math.inf, -math.inf]


# --- the probe ----------------------------------------------------------------------------------------------------


def test_a_server_with_another_model_is_refused_with_both_numbers_before_anything_is_stored(
    job, api, connect, tiny_llama, tmp_path
):
    api.model = tiny_llama(seed=9, vocab_size=VOCABULARY, spread=2.0, dtype=torch.float32)
    with pytest.raises(InputError, match=r"does not serve target .* differ by [\d.]+ nats .* allows 0\.01; .* agree at \d of"):
        job(server=connect(probe_tolerance=0.01)).prepare()
    assert not (tmp_path / "cache").exists()
    job(server=connect(probe_tolerance=20.0)).prepare()


def test_the_probe_measures_the_mean_difference_at_the_servers_likeliest_tokens(job, api, connect, caplog):
    def sharpen(answer, asked):
        for distribution in answer["choices"][0]["prompt_logprobs"][1:]:
            for entry in distribution.values():
                entry["logprob"] -= 0.25
        return answer

    api.spoil = sharpen
    with pytest.raises(
        InputError, match=r"differ by 0\.25 nats on average, and server\.probe_tolerance allows 0\.2; .* 3 of 3"
    ):
        job(server=connect(probe_tolerance=0.2)).prepare()
    caplog.set_level("INFO", logger="draftsmith")
    job(server=connect(probe_tolerance=0.3)).prepare()
    assert "off by 0.25 nats on average" in caplog.text


# --- reaching the server ------------------------------------------------------------------------------------------


def test_a_model_that_is_not_served_is_refused_with_those_that_are(connect):
    connect().check_model()
    with pytest.raises(InputError, match=r"server\.model: .* serves tiny, got large"):
        connect(model="large").check_model()


def test_an_address_that_is_no_api_is_refused(api, connect):
    with pytest.raises(InputError, match=r"has no list of models \(status 404\): give the address of the API"):
        connect(url=api.url.removesuffix("/v1")).check_model()
    api.name = None
    with pytest.raises(InputError, match="does not list its models"):
        connect().check_model()


def test_a_key_is_sent_and_a_wrong_or_missing_one_is_told_apart(api, connect, monkeypatch):
    api.key = "right"
    with pytest.raises(InputError, match=r"refuses requests without a key; name its variable in server\.api_key_variable"):
        connect().check_model()
    monkeypatch.delenv("SERVER_KEY", raising=False)
    with pytest.raises(InputError, match="the environment variable SERVER_KEY is not set"):
        connect(api_key_variable="SERVER_KEY")
    monkeypatch.setenv("SERVER_KEY", "wrong")
    with pytest.raises(InputError, match=r"refuses the key in SERVER_KEY \(status 401\)"):
        connect(api_key_variable="SERVER_KEY").check_model()
    monkeypatch.setenv("SERVER_KEY", "right")
    connect(api_key_variable="SERVER_KEY").check_model()


# --- answers that cannot be used ----------------------------------------------------------------------------------


def choice(change):
    """Return what spoils an answer: a change of its only choice."""

    def spoil(answer, asked):
        change(answer["choices"][0])
        return answer

    return spoil


def probs_3(change):
    """Return what spoils an answer: a change of the distribution of token 3, the first label."""
    return choice(lambda content: change(content["prompt_logprobs"][3]))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (choice(lambda content: content.update(prompt_logprobs=None)), "answers without log-probabilities of the prompt"),
        (choice(lambda content: content["prompt_logprobs"].__setitem__(4, None)), "position 4 of 7: .* no log-probabilities"),
        (
            probs_3(lambda distribution: [distribution.popitem(), distribution.popitem()]),
            r"position 3 .* expected 5 .*got 4; .*--max-logprobs 5",
        ),
        (choice(lambda content: content["prompt_logprobs"].append({})), "answers for 8 tokens where 7 were sent"),
        (
            choice(lambda content: content["prompt_logprobs"].pop()),
            "answers for 6 tokens where 7 were sent: it cuts prompts off",
        ),
        (lambda answer, asked: {**answer, "usage": {"prompt_tokens": 4}}, "answers for 4 tokens where 7 were sent"),
        (choice(lambda content: content.update(prompt_token_ids=[1] * 7)), "read other token ids than were sent"),
        (
            probs_3(lambda distribution: distribution.update({"258": {"logprob": -0.1}})),
            "position 3 .* token id 258 lies outside .* of 258",
        ),
        (probs_3(lambda distribution: distribution.update({"-1": {"logprob": -0.1}})), "token id -1 lies outside"),
        (
            probs_3(lambda distribution: distribution.update({"1": {"logprob": 0.0}, "2": {"logprob": -0.1}})),
            "are no log-probabilities: .* more than 1",
        ),
        (probs_3(lambda distribution: distribution.update({"1": {"logprob": 800.0}})), "are no log-probabilities"),
        (probs_3(lambda distribution: distribution.update({"1": {"logprob": math.inf}})), "is not finite"),
        (probs_3(lambda distribution: distribution.update({"1": {"logprob": math.nan}})), "is not finite"),
        (
            probs_3(lambda distribution: distribution.update({"the": {"logprob": -0.1}})),
            "in a form that is not known here: choices.0.prompt_log",
        ),
        (lambda answer, asked: {"choices": []}, "in a form that is not known here: choices: "),
        (lambda answer, asked: ["hello"], "in a form that is not known here"),
    ],
)
def test_an_answer_that_cannot_be_right_is_refused(api, connect, spoil, complaint):
    api.spoil = spoil
    with pytest.raises(InputError, match=complaint):
        list(connect().top_k([EXAMPLE], K, VOCABULARY))


def test_a_refused_request_quotes_the_server_and_names_the_limit_to_raise(api, connect):
    api.respond = lambda *_: (400, {}, {"error": {"message": "Requested prompt logprobs of 5, max allowed: 3"}})
    with pytest.raises(InputError, match=r"7 tokens.*\(status 400\): Requested .* allowed: 3; .*--max-logprobs 5, or lower k"):
        list(connect().top_k([EXAMPLE], K, VOCABULARY))


# --- config -------------------------------------------------------------------------------------------------------


def test_a_server_is_for_top_k_caches_only():
    server = "server={url: 'http://host:8000/v1', model: m}"
    with pytest.raises(ConfigError, match=r"kind must be top_k with a server, .* got last_hidden"):
        load_config(CacheConfig, None, [server])
    assert load_config(CacheConfig, None, [server, "kind=top_k"]).server.model == "m"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        *(
            (url, "url must be that of an API, such as http://host:8000/v1")
            for url in ("host:8000/v1", "ftp://host/v1", "http://")
        ),
        ("http://host:0/v1", "url must be that of an API, such as http://host:8000/v1"),
        *((f"http://{secret}", "api_key_variable") for secret in ("me:hunter2@host", "hunter2@host", "host/v1?key=hunter2")),
    ],
)
def test_an_address_must_be_one_without_secrets_which_are_not_repeated(url, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_config(CacheConfig, None, ["kind=top_k", f"server={{url: '{url}', model: m}}"])
    assert "hunter2" not in str(caught.value)

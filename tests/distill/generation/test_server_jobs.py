"""A data set whose answers a server wrote: the local target's own where the server is right, and nothing where it is not."""

import dataclasses
import itertools
import json
import logging
from pathlib import Path

import pytest
import torch

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.loading import load_config
from configs.runtime.progress import Tokens
from configs.schema.data import DataConfig
from distill.dataset.conversations import is_written_by_target, read_conversations
from distill.generation import make_dataset as making
from distill.generation.answers import NO_ROOM, UNREACHED
from distill.generation.continuation import request_number
from distill.generation.make_dataset import answer_job, make_dataset
from distill.generation.prompts import split_prompts
from distill.generation.self_seeding import find_user_frame, read_turn
from distill.generation.server_completions import server_writer
from distill.generation.server_jobs import server_turns
from distill.generation.sources import list_prompts
from distill.server.logprobs import TargetServer
from tests.support.fake_server import Api, serving

SIDES = ("train.jsonl", "held_out.jsonl")
NUM_PROMPTS, NUM_TURNS = 12, 16


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr("distill.server.connection.pause", lambda stopping, seconds: None)


@pytest.fixture
def config(tmp_path, byte_target_folder, api):
    """A function that gives the config of a small data set, a third of its prompts of two turns."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"question_id": n, "turns": [f"question {n}", "why?"][: 1 + (n % 3 == 0)]} for n in range(NUM_PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(name="data", written_by="server", answers=None, prompts=None, **server):
        given = {"url": api.url, "model": "tiny", "concurrency": 3, "retries": 2, "timeout_seconds": 10.0} | server
        return DataConfig.model_validate(
            {
                "target": {"name": str(byte_target_folder), "dtype": "float32", "device": "cpu"},
                "prompts": prompts or {"source": "file", "path": str(path), "num_prompts": NUM_PROMPTS},
                "answers": {"max_new_tokens": 10, "temperature": 0.0, "written_by": written_by} | (answers or {}),
                "server": given if written_by == "server" else None,
                "held_out_share": 0.3,
                "output": str(tmp_path / name),
            }
        )

    return make


def made(config):
    make_dataset(config)
    return {path.name: path.read_bytes() for path in Path(config.output).iterdir()}


def sides(files):
    return [files[name] for name in SIDES]


def test_greedy_answers_by_a_server_are_the_local_targets_byte_for_byte_and_the_manifest_says_who_wrote(config):
    served, local = made(config()), made(config("local", written_by="target"))
    assert sides(served) == sides(local)
    manifest = json.loads(served["manifest.json"])
    assert manifest["answers_written_by"] == "server"
    assert manifest["server"] == {"model": "tiny", "found": [{"version": "1.2.3", "system_fingerprint": "fp-1"}]}
    assert is_written_by_target(Path(config().output) / "train.jsonl")
    assert "server" not in json.loads(local["manifest.json"])


def test_several_servers_share_the_prompts_and_one_that_dies_is_left_out_by_name(config, api, byte_target, caplog):
    def dies_after(served, num_answers):
        numbers = itertools.count()

        def respond(path, headers, body):
            dead = path == "/v1/completions" and next(numbers) >= num_answers
            return "reset" if dead else Api.respond(served, path, headers, body)

        served.respond = respond

    with serving(Api(byte_target)) as second:
        several = {"more_urls": [second.url], "concurrency": 1, "retries": 1}
        dies_after(second, 3)  # the first is the check's
        assert sides(made(config("both", **several))) == sides(made(config("local", written_by="target")))
        assert len(second.asked) == 3
        assert f"server {second.url} is left out from now on" in caplog.text
        assert "1 of 2 are left" in caplog.text
        dies_after(api, 2)
        dies_after(second, 2)
        with pytest.raises(InputError, match=r"no server is left, the last to fail was http"):
            make_dataset(config("none", **several))
        second.name = "other"
        with pytest.raises(InputError, match=f"server.model: {second.url} serves other, got tiny"):
            make_dataset(config("wrong", **several))


def test_sampled_answers_are_the_same_in_every_run_however_they_come(config, api):
    first = made(config(answers={"temperature": 1.0}))
    again = made(config("again", answers={"temperature": 1.0}, concurrency=1))
    assert sides(first) == sides(again)
    seeds = [body["seed"] for body in api.asked if "seed" in body]
    assert len(set(seeds)) == len(seeds) / 2  # each asked once in each run


def test_troubles_on_the_way_leave_no_trace_in_the_data(config, api):
    undisturbed = made(config("undisturbed"))
    troubles, plain = ["cut", (500, {}), "reset", None, "cut without length", (429, {}), "garbage", None] * 3, api.respond

    def respond(path, headers, body):
        met = troubles.pop() if body is not None and "seed" in body and troubles else None
        if isinstance(met, str):
            return met
        return plain(path, headers, body) if met is None else (*met, {"error": "overloaded"})

    api.respond = respond
    assert sides(made(config(retries=30))) == sides(undisturbed)
    assert troubles == []


def test_a_server_that_dies_ends_the_run_and_the_next_one_asks_for_the_rest_alone(config, api):
    undisturbed = made(config("undisturbed"))
    api.asked.clear()
    plain = api.respond

    def die_after_five(path, headers, body):
        return plain(path, headers, body) if len(api.asked) < 6 else (503, {}, {"error": "going down"})

    api.respond = die_after_five
    with pytest.raises(
        InputError, match=r"3 requests in a row .* status 503: going down; gave up after 3 attempts .* rerun the same command"
    ):
        make_dataset(config(failures_in_a_row=3))
    [pieces] = Path(config().output).glob(".answers.partial-*")
    kept = [json.loads(line)["piece"]["rows"] for line in pieces.read_text().splitlines()[1:]]
    assert kept
    api.respond = plain
    api.asked.clear()
    assert sides(made(config(failures_in_a_row=3))) == sides(undisturbed)
    assert len([body for body in api.asked if "seed" in body]) == NUM_TURNS - sum(map(len, kept))


def test_a_prompt_that_always_fails_is_named_when_all_others_are_answered(config, api):
    plain, failing = api.respond, []

    def respond(path, headers, body):
        if body is not None and "seed" in body:
            failing[:] = failing or [body["prompt"]]
            if body["prompt"] == failing[0]:
                return 500, {}, {"error": "this one never"}
        return plain(path, headers, body)

    api.respond = respond
    with pytest.raises(InputError, match=r"1 of 12 requests .*the first for prompt \d+: server.*status 500: this one never"):
        make_dataset(config())
    api.respond = plain
    api.asked.clear()
    make_dataset(config())
    assert len([body for body in api.asked if "seed" in body]) <= 2  # its turns


def test_two_processes_share_the_prompts_and_a_third_run_finds_nothing_to_do(config, api, byte_target, tmp_path):
    settings = config()
    prompts = list_prompts(settings.prompts)
    with TargetServer(settings.server) as server:
        writer = server_writer(settings, byte_target, server)
        job = answer_job(settings, byte_target, split_prompts(prompts, 0.3), tmp_path / "pieces", writer)
        for rank in (1, 0):
            job.work(rank=rank, num_processes=2)
        asked = len(api.asked)
        job.work(rank=0, num_processes=1)
        assert len(api.asked) == asked == NUM_TURNS
        answered = job.collect()
        rows = [row for prompt in job.prompts for row in answered.rows_of(prompt)]
    assert [row.prompt_id for row in rows] == sorted(row.prompt_id for row in rows)
    local = made(config("local", written_by="target"))
    assert {row.to_line() for row in rows} == {line + "\n" for side in sides(local) for line in side.decode().splitlines()}


def test_a_server_with_another_model_is_refused_before_anything_is_asked_for(config, api, tiny_llama):
    api.model = tiny_llama(seed=9, vocab_size=258, spread=2.0, dtype=torch.float32)
    with pytest.raises(InputError, match=r"does not serve target .* differ by [\d.]+ nats .* allows 0\.01"):
        make_dataset(config(probe_tolerance=0.01))
    assert [body for body in api.asked if "seed" in body] == []


def test_a_model_that_is_not_served_is_refused_before_the_target_is_loaded(config, monkeypatch):
    monkeypatch.setattr(making, "load_target", lambda config: pytest.fail("loaded"))
    with pytest.raises(InputError, match=r"server\.model: .* serves tiny, got large"):
        make_dataset(config(model="large"))


def test_answers_of_another_model_or_seed_are_not_gone_on_with(config, api, byte_target, tmp_path):
    prints = []
    api.respond = lambda *_: (200, {}, {"data": [{"id": name} for name in ("tiny", "other")]})
    for settings in (config(), config(answers={"top_k": 3}), config(model="other"), config(concurrency=1)):
        with TargetServer(settings.server) as server:
            split = split_prompts(list_prompts(settings.prompts), 0.3)
            writer = server_writer(settings, byte_target, server)
            prints.append(answer_job(settings, byte_target, split, tmp_path, writer).fingerprint)
    assert len(set(prints)) == 3
    assert prints[0] == prints[3]


def test_the_servers_shorter_context_counts_and_what_does_not_fit_is_told(config, api, byte_target, caplog):
    caplog.set_level("INFO", logger="draftsmith")
    longest = len(byte_target.encode_chat([{"role": "user", "content": "question 0"}])) + 14
    plain = api.respond
    card = {"data": [{"id": "tiny", "max_model_len": longest}]}
    api.respond = lambda path, *rest: (200, {}, card) if path == "/v1/models" else plain(path, *rest)
    files = made(config(answers={"max_new_tokens": 100}))
    assert f"context of {longest} tokens is shorter than the target's" in caplog.text
    rows = [row for name in SIDES for row in read_conversations(Path(config().output) / name)]
    assert all(len(row.prompt_ids) + len(row.answer_ids) <= longest for row in rows)
    dropped = json.loads(files["manifest.json"])["counts"]["dropped"]
    assert dropped == {NO_ROOM: 4}
    assert UNREACHED not in dropped


def test_the_key_is_in_no_file_and_in_no_line_of_the_log(config, api, monkeypatch, caplog, tmp_path, capfd):
    caplog.set_level(logging.DEBUG)
    api.key = "planted-key-42"
    monkeypatch.setenv("SERVER_KEY", api.key)
    api.troubles = [(500, {}), "cut"]
    make_dataset(config(api_key_variable="SERVER_KEY"))
    api.key = "another"
    with pytest.raises(InputError, match="refuses the key in SERVER_KEY") as caught:
        make_dataset(config("refused", api_key_variable="SERVER_KEY"))
    said = caplog.text + "".join(capfd.readouterr()) + str(caught.value)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 4
    assert not [path for path in files if b"planted-key-42" in path.read_bytes()]
    assert "planted-key-42" not in said
    assert "trying again" in said


# --- self-seeded prompts ------------------------------------------------------------------------------------------

SEEDED = {"source": "self_seeded", "num_prompts": 8, "max_prompt_tokens": 90, "top_p": 0.99}


def turns_asked(api, target):
    prefix = find_user_frame(target, 90).prefix_ids
    return [body for body in api.asked if "seed" in body and tuple(body["prompt"]) == prefix]


@pytest.fixture
def quick_turns(api, byte_target):
    """Let the server end every text soon, one in four without a word."""

    def continuation(body):
        said = f"turn {body['seed']}" if body["seed"] % 4 else ""
        ids = [*byte_target.tokenizer(said, add_special_tokens=False)["input_ids"], *byte_target.eos_token_ids]
        return {"text": said, "token_ids": ids[: body["max_tokens"]], "finish_reason": "stop"}

    api.continuation = continuation


def test_prompts_by_a_server_are_turns_of_its_own_and_not_asked_for_again(config, api, byte_target, quick_turns):
    first = made(config(prompts=SEEDED, answers={"batch_size": 4, "max_new_tokens": 30}))
    asked = turns_asked(api, byte_target)
    assert len({body["seed"] for body in asked}) == len(asked) >= 8
    assert {(body["temperature"], body["top_p"], body["max_tokens"]) for body in asked} == {(1.0, 0.99, 90)}
    again = config(
        "again", prompts=SEEDED, answers={"batch_size": 4, "max_new_tokens": 30}, concurrency=1, failures_in_a_row=1, retries=0
    )
    plain, left = api.respond, [len(asked) - 3]

    def die_among_the_turns(path, headers, body):
        if body is not None and "seed" in body:
            left[0] -= 1
            if left[0] < 0:
                return 503, {}, {"error": "going down"}
        return plain(path, headers, body)

    api.respond = die_among_the_turns
    with pytest.raises(InputError, match=r"requests in a row .* self-seeded turn \d+: server.*going down"):
        make_dataset(again)
    api.respond = plain
    api.asked.clear()
    assert sides(made(again)) == sides(first)
    assert len(turns_asked(api, byte_target)) == 3
    assert json.loads(first["manifest.json"])["counts"]["prompts"] == 8


def test_turns_are_usable_by_the_same_rules_as_local_ones(config, api, byte_target, tmp_path):
    settings = config(prompts=SEEDED)
    frame = find_user_frame(byte_target, 90)
    with TargetServer(settings.server) as server:
        writer = server_writer(settings, byte_target, server)
        texts = dict(server_turns(writer, settings.prompts, tmp_path / "turns", 0, frame, range(6), Tokens()))
    written = {body["seed"]: api.continuation(body)["token_ids"] for body in turns_asked(api, byte_target)}
    seeds = [request_number(f"0/{request_number(f'self-{number}')}") % 2**31 for number in range(6)]
    assert texts == {number: read_turn(byte_target, frame, written[seed]) for number, seed in enumerate(seeds)}
    assert None in texts.values()
    assert any(texts.values())


def test_a_template_that_ends_turns_by_plain_text_is_refused(config, byte_target, tmp_path):
    settings = config(prompts=SEEDED)
    frame = dataclasses.replace(find_user_frame(byte_target, 90), end_ids=frozenset())
    with TargetServer(settings.server) as server:
        writer = server_writer(settings, byte_target, server)
        with pytest.raises(InputError, match="ends a user's turn by plain text"):
            server_turns(writer, settings.prompts, tmp_path / "turns", 0, frame, [0], Tokens())


# --- config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["answers.written_by=server"], r"got written_by 'server' without a server"),
        (["server={url: 'http://h/v1', model: m}"], r"got written_by 'target' with a server"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_config(DataConfig, None, overrides)


def test_a_key_in_place_of_its_variables_name_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="not the key") as caught:
        load_config(
            DataConfig,
            None,
            ["answers.written_by=server", "server={url: 'http://h/v1', model: m, api_key_variable: sk-hunter2}"],
        )
    assert "hunter2" not in str(caught.value)

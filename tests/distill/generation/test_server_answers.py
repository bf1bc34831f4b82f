"""Answers by a server: what it is asked, what its answer comes to, and a data set that is the local target's own or nothing."""

import json
import math
import os
import threading
import time
from pathlib import Path

import pytest

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.loading import load_config
from configs.schema.data import AnswersConfig, DataConfig, ServerConfig
from distill.dataset.conversations import is_written_by_target, read_conversations
from distill.generation.answers import NO_ROOM
from distill.generation.bad_rows import LeftOut
from distill.generation.make_dataset import answer_job, make_dataset
from distill.generation.prompts import split_prompts
from distill.generation.server_answers import ServerAnswerJob, read_ids
from distill.generation.sources import list_prompts
from distill.server.connection import Connection, read_completion

ENDS = (9, 7)
GREEDY = AnswersConfig()


@pytest.fixture
def writer(api, byte_target, stack, tmp_path):
    """A function that gives a job over the fake server; settings go to its config."""

    def make(sampling=GREEDY, prompts=(), **settings):
        config = ServerConfig(**{"url": api.url, "model": "tiny", "retries": 0, "timeout_seconds": 10.0, **settings})
        job = {"prompts": prompts, "config": sampling, "seed": 3, "folder": tmp_path, "fingerprint": "job"}
        server = stack.enter_context(Connection(config))
        return ServerAnswerJob(server=server, target=byte_target, max_positions=160, **job)

    return make


@pytest.fixture
def prompt(byte_target):
    return byte_target.encode_chat([{"role": "user", "content": "hello"}])


def test_every_setting_of_the_sampling_is_sent(writer, api, prompt):
    writer(AnswersConfig(temperature=0.7, top_k=40, top_p=0.9)).write(prompt, 5, 20)
    writer().write(prompt, 5, 20)
    sampled, greedy = api.asked
    assert sampled["prompt"] == prompt
    assert (sampled["temperature"], sampled["top_k"], sampled["top_p"]) == (0.7, 40, 0.9)
    assert (greedy["temperature"], greedy["top_k"], greedy["top_p"]) == (0.0, -1, 1.0)
    off = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: sampled[name] for name in off} == off
    assert (sampled["max_tokens"], sampled["model"], sampled["stop_token_ids"]) == (20, "tiny", list(api.target.eos_token_ids))


@pytest.mark.parametrize("status", [400, 500])
def test_a_prompt_that_always_fails_ends_the_run_and_what_was_answered_is_not_asked_again(config, api, status):
    plain = api.respond

    def fail_one(path, headers, body):
        failing = "seed" in (body or {}) and len(body["prompt"]) == longest
        return (status, {}, {"error": "no"}) if failing else plain(path, headers, body)

    undisturbed = made(config("undisturbed"))
    longest = max(len(body["prompt"]) for body in api.asked if "seed" in body)
    api.respond = fail_one
    api.asked.clear()
    with pytest.raises(InputError, match=r"^prompt \d+: .*; the answers so far are kept"):
        make_dataset(config())
    api.respond = plain
    assert sides(made(config())) == sides(undisturbed)
    # Of the failed run only the answers under way are asked for again.
    assert NUM_TURNS <= len([body for body in api.asked if "seed" in body]) <= NUM_TURNS + 2 * 3


def test_as_many_are_under_way_as_allowed_and_what_came_is_kept_when_one_is_given_up(writer, api, make_prompts, monkeypatch):
    together, prompts = threading.Barrier(4), make_prompts(12)

    def answer(job, number):
        together.wait(5)
        if number == 9:
            raise InputError("given up")
        return {"rows": [], "dropped": {str(number): 1}}

    monkeypatch.setattr(ServerAnswerJob, "_answer", answer)
    job = writer(prompts=prompts, concurrency=4)
    with pytest.raises(InputError, match="given up"):
        job.work(rank=0, num_processes=1)
    assert job.finished() == {*range(12)} - {9}


def test_answers_that_come_while_the_disk_is_waited_for_are_written_together(writer, make_prompts, monkeypatch):
    writes = []
    monkeypatch.setattr(os, "fsync", lambda number: writes.append(number) or time.sleep(0.05))
    monkeypatch.setattr(ServerAnswerJob, "_answer", lambda job, number: {"rows": [], "dropped": {str(number): 1}})
    job = writer(prompts=make_prompts(24), concurrency=4)
    job.work(rank=0, num_processes=1)
    assert job.finished() == {*range(24)}
    assert len(writes) <= 12


def test_an_answer_to_other_token_ids_or_of_another_form_is_refused(writer, api, prompt):
    for change, complaint in (
        ({"prompt_token_ids": [1, 2]}, "read other token ids than were sent"),
        ({"token_ids": "abc"}, r"in a form that is not known here: choices\.0\.token_ids"),
    ):
        api.spoil = lambda answer, asked, change=change: answer["choices"][0].update(change) or answer
        with pytest.raises(InputError, match=complaint):
            writer().write(prompt, 5, 20)


@pytest.mark.parametrize(
    ("token_ids", "finish", "expected"),
    [
        ([1, 2, 3, 4], "length", [1, 2, 3, 4]),
        ([1, 2, 9], "stop", [1, 2, 9]),
        ([1, 7, 3, 4], "length", [1, 7]),  # a server that does not stop where it was told to
        ([1, 2, 3, 9], "length", [1, 2, 3, 9]),
        ([1, 2], "stop", "stop"),
        ([], "stop", "stop"),
        ([1, 2], "length", "length"),
        ([1, 2, 3, 4, 9], "stop", "stop"),
        ([-1, 9], "stop", "-1"),
        ([1, 9], "content_filter", "content_filter"),
        (None, "stop", "return_token_ids"),
        ([1, 2], "abort", "abort"),
    ],
)
def test_ids_go_up_to_the_end_of_the_answer_and_one_that_cannot_be_right_is_refused(token_ids, finish, expected):
    choice = {"token_ids": token_ids, "finish_reason": finish}
    answer = read_completion({"choices": [choice]}, "the server")
    if isinstance(expected, list):
        assert read_ids(answer, 4, ENDS, 20, "the server") == expected
        return
    with pytest.raises(InputError, match=expected):
        read_ids(answer, 4, ENDS, 20, "the server")


# --- a data set ---------------------------------------------------------------------------------------------------

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
    assert manifest["server"] == {"model": "tiny"}
    assert is_written_by_target(Path(config().output) / "train.jsonl")
    assert "server" not in json.loads(local["manifest.json"])


def test_sampled_answers_are_the_same_in_every_run_however_they_come(config, api):
    first = made(config(answers={"temperature": 1.0}))
    again = made(config("again", answers={"temperature": 1.0}, concurrency=1))
    assert sides(first) == sides(again)
    seeds = [body["seed"] for body in api.asked if "seed" in body]
    assert len(set(seeds)) == len(seeds) / 2  # each asked once in each run


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda entry: entry.update(logprob=entry["logprob"] - 0.25), r"0\.25.*server\.probe_tolerance"),
        (lambda entry: entry.update(logprob=math.nan), r"server\.probe_tolerance"),
        (None, "prompt_logprobs"),
    ],
)
def test_the_probe_measures_the_mean_difference_at_the_servers_likeliest_tokens(config, api, change, complaint):
    def spoil(answer, asked):
        entries = answer["choices"][0]["prompt_logprobs"]
        for entry in [each for one in (entries or [None])[1:] for each in one.values()] if change else ():
            change(entry)
        if change is None:
            answer["choices"][0]["prompt_logprobs"] = None
        return answer

    api.spoil = spoil
    with pytest.raises(InputError, match=complaint):
        make_dataset(config(probe_tolerance=0.2))
    assert [body for body in api.asked if "seed" in body] == []


def test_answers_of_another_model_or_seed_are_not_gone_on_with(config, api, byte_target, tmp_path):
    prints = []
    api.respond = lambda *_: (200, {}, {"data": [{"id": name} for name in ("tiny", "other")]})
    for settings in (config(), config(answers={"top_k": 3}), config(model="other"), config(concurrency=1)):
        with Connection(settings.server) as server:
            split = split_prompts(list_prompts(settings.prompts, LeftOut()), 0.3)
            prints.append(answer_job(settings, byte_target, split, tmp_path, server).fingerprint)
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


@pytest.mark.parametrize("settings", [["answers.written_by=server"], ["server={url: 'http://h/v1', model: m}"]])
def test_a_server_and_answers_by_it_go_together(settings):
    with pytest.raises(ConfigError, match="written_by"):
        load_config(DataConfig, None, settings)

"""Secrets and machine paths are masked in command lines, configs, logs, errors and what is published; nothing else is."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from pathlib import Path

import pytest

from configs.runtime import redaction
from configs.runtime.command import BAD_INPUT, run_command
from configs.runtime.errors import InputError
from configs.runtime.redaction import (
    PIECE_BYTES,
    hide,
    holds_token,
    mask_arguments,
    mask_counting,
    mask_secrets,
    redact,
    scrub,
    scrub_value,
)
from configs.schema.decoding import DecodeConfig

HUB = "hf_" + "aB3" * 11
LETTERS = "abcDEF123" * 3


def test_an_argument_with_a_secret_key_loses_its_value_and_one_that_only_speaks_of_tokens_stays():
    for argument in ("hub.token=x", "client_secret=x", "db.password=x", "apiKey=x", "token.value=x", "hub={token: x}"):
        masked = argument.partition("=")[0] + "=***"
        assert mask_arguments(["--set", argument, f"--set={argument}"]) == ["--set", masked, f"--set={masked}"]
    harmless = ["num_speculative_tokens=3", "verification=token", "data.train=tokens.jsonl", "--config", "my_token.yaml"]
    assert mask_arguments(harmless) == harmless


SECRETS = {  # text -> what is left of it
    f"401 for {HUB}, try again": "401 for ***, try again",
    f"OPENAI sk-{LETTERS}": "OPENAI ***",
    f"ghp_{LETTERS} github_pat_{LETTERS}": "*** ***",
    f"x eyJ{LETTERS}.{LETTERS}.{LETTERS}": "x ***",
    "https://user:pa55@host/x and postgres://u@h:1/db": "https://***@host/x and postgres://***@h:1/db",
    "Authorization: Bearer abc, then": "Authorization: ***, then",
    "{'Authorization': 'Basic abc=='}": "{'Authorization': '***'}",
    "https://host/x?access_token=abc&sig=abc&page=2&key=def#top": "https://host/x?access_token=***&sig=***&page=2&key=***",
    '{"password": "abc", "n": 1}': '{"password": "***", "n": 1}',
    "postgres://user:p@ssw0rdlong@host/db": "postgres://***@host/db",
    "X-Api-Key: v, then": "X-Api-Key: ***, then",
    "api_key: v\nnext: 1": "api_key: ***\nnext: 1",
    "password='abc def' user=x": "password='***' user=x",
    '{"password": "a\\"b c", "n": 1}': '{"password": "***", "n": 1}',
    "aws_secret_access_key = a/b+c\nSECRET_KEY='d e'": "aws_secret_access_key = ***\nSECRET_KEY='***'",
    "private_key: x AccountKey=y==;z": "private_key: *** AccountKey=***;z",
    "ASIA" + "A1" * 8 + f" sk_live_{LETTERS} npm_{4 * 'abcDEF123'}": "*** *** ***",
}


@pytest.mark.parametrize("text", SECRETS)
def test_what_has_the_form_of_a_secret_is_masked(text):
    assert redact(text) == SECRETS[text]
    assert redact(redact(text)) == SECRETS[text]


@pytest.mark.parametrize(
    "text",
    [
        "max_new_tokens=48 num_speculative_tokens=3",
        "0123456789abcdef0123456789abcdef01234567",  # a commit
        "hf_hub/model and sk-learn, task-decomposition-of-the-week",
        "http://host:8000/v1/models@main mail@example.com",
        "--set hub_token: expected text, got 5",
        "next token: 5, tokens per target step 1.5",
        "max_new_tokens: 5, token_ids: [1, 2], {'token': 5}",
        "server.api_key_variable: HF_TOKEN",
        "password: null, {'api_key': None} secret://place, password:",
        "runs/secret_agents/train.jsonl",
    ],
)
def test_what_only_looks_a_little_like_one_stays(text):
    assert redact(text) == text


def test_the_values_of_secret_variables_are_known_wherever_they_turn_up(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("OLD_API_KEY", "0123456789")  # which begins the other one
    monkeypatch.setenv("MY_KEY", str(tmp_path))  # a place
    monkeypatch.setenv("AWS_SECRET", "/begins/like+a/path")
    monkeypatch.setenv("DB_PASSWORD", "yes")  # too short to be told from a word
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "disabled")
    said = f"(0123456789abcdef) {tmp_path} /begins/like+a/path yes disabled"
    assert redact(said) == f"(***) {tmp_path} *** yes disabled"


def test_secrets_of_any_form_are_masked_in_arguments_and_in_values():
    arguments = ["--set", f"prompts.path={HUB}", "--set=target.name=https://u:p@h/x"]
    assert mask_arguments(arguments) == ["--set", "prompts.path=***", "--set=target.name=https://***@h/x"]
    others = ["--api-key", "x", "--tokens", "y", "--token=z"]  # options of other programs
    assert mask_arguments(others) == ["--api-key", "***", "--tokens", "y", "--token=***"]
    value = {"a": [f"say {HUB}", {"password": 12, "n": 1}], "api_key": {"id": ["y", 1.5, None], "on": True}, "token": None}
    hidden = {"a": ["say ***", {"password": "***", "n": 1}], "api_key": "***", "token": None}
    harmless = {"pad_token": 0, "max_new_tokens": 5, "token_ids": [1, 2], "num_speculative_tokens": 3}
    assert mask_secrets(value | harmless) == hidden | harmless


def test_complaints_log_and_tracebacks_show_no_secret(capsys, monkeypatch):
    def main(config):
        logging.getLogger("draftsmith").warning("asking with %s", HUB)
        raise InputError(f"refused {HUB}")

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    assert run_command(DecodeConfig, main, description="", argv=[]) == BAD_INPUT
    try:
        raise RuntimeError(f"status 500 from https://u:p@h with {HUB}")
    except RuntimeError as error:
        sys.excepthook(RuntimeError, error, error.__traceback__)
    said = capsys.readouterr().err
    assert "asking with ***" in said
    assert "error: refused ***" in said
    assert said.endswith("RuntimeError: status 500 from https://***@h with ***\n")
    assert "Traceback (most recent call last)" in said
    assert HUB not in said


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("--set=target.name=/data/models/llama", "--set=target.name=llama"),
        ("/checkout/runs/demo/report.json", "runs/demo/report.json"),
        ("/checkout", "."),
        ("~/models/x and ~bob/y", "x and y"),
        ("../../alice/secret.txt", "secret.txt"),
        ("file:///home/alice/x", "x"),
        ("https://huggingface.co/owner/name/blob/main", "https://huggingface.co/owner/name/blob/main"),
        ("owner/name", "owner/name"),
        ("12 tokens/s, τ 1.6/2", "12 tokens/s, τ 1.6/2"),
        ("my s3cr3t words", "my *** words"),
        ("/home/alice/deals 2026/train.jsonl", "train.jsonl"),
        ("/a/b differs from /c/d, said /e/f", "b differs from d, said f"),
    ],
)
def test_paths_lose_their_folders_and_secrets_their_value(text, clean, monkeypatch):
    monkeypatch.setattr(redaction, "CHECKOUT", Path("/checkout"))
    hide("s3cr3t")
    assert scrub(text) == clean
    assert scrub(clean) == clean


def test_values_under_secret_keys_and_in_commands_are_masked_at_every_depth():
    value = {"a": [{"api_key": "x1"}], "command": ["run", "--set", "hub.token=x2"], "/home/alice/k": 1, "max_new_tokens": 3}
    assert scrub_value(value) == {
        "a": [{"api_key": "***"}],
        "command": ["run", "--set", "hub.token=***"],
        "k": 1,
        "max_new_tokens": 3,
    }
    assert mask_secrets({"credentials": {"command": ["s3cr3t-value"]}}) == {"credentials": "***"}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("write to ann.b+c@mail.example.com.", "email"),
        ("use sk-" + "aB3" * 8 + " for it", "token"),
        ("hf_" + "Q" * 30, "token"),
        ("git clone https://ann:pw@host/repo", "login"),
        ("curl -H 'Authorization: Bearer abc.def.ghi'", "header"),
        ("set PASSWORD=hunter22 first", "assigned"),
    ],
)
def test_secrets_in_texts_that_people_wrote_are_masked_and_counted(text, kind):
    found = Counter()
    masked = mask_counting(text, found)
    assert masked != text
    assert "***" in masked
    assert +found == Counter({kind: 1})
    assert mask_counting(masked, Counter()) == masked


@pytest.mark.parametrize("start", [0, PIECE_BYTES - len(HUB) // 2, PIECE_BYTES - 1, PIECE_BYTES])
def test_a_token_in_a_file_is_found_also_where_two_pieces_that_are_read_meet(tmp_path, start):
    path = tmp_path / "merges.txt"
    path.write_bytes(b"\n" * start + HUB.encode() + b"\n")
    assert holds_token(path)


def test_a_hidden_value_in_a_file_is_found_and_one_that_may_be_part_of_a_word_is_not(tmp_path):
    (tmp_path / "report.json").write_text('{"wrong_tokens": 1, "said": "quite-plain"}')
    hide("wrong")
    assert not holds_token(tmp_path / "report.json")
    hide("quite-plain")
    assert holds_token(tmp_path / "report.json")

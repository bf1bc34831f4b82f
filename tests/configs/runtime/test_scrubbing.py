"""Paths and secrets are taken out of what is published, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.runtime.redaction import Scrubber
from scripts.publish.publication import public_name


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/home/alice/.venv/bin/python", "python"),
        ("--set=target.name=/data/models/llama", "--set=target.name=llama"),
        ("/checkout/runs/demo/report.json", "runs/demo/report.json"),
        ("/checkout", "."),
        ("~/models/x and ~bob/y", "x and y"),
        ("../../alice/secret.txt", "secret.txt"),
        ("C:\\Users\\alice\\model", "model"),
        ("file:///home/alice/x", "x"),
        ("https://huggingface.co/owner/name/blob/main", "https://huggingface.co/owner/name/blob/main"),
        ("owner/name", "owner/name"),
        ("runs/demo/distill", "runs/demo/distill"),
        ("12 tokens/s, τ 1.6/2", "12 tokens/s, τ 1.6/2"),
        ("token hf_abcdefghijklmnopqrstuvw", "token ***"),
        ("https://ann:pw@host/x", "https://***@host/x"),
        ("Authorization: Bearer abcdef123456", "Authorization: ***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0abc.sig", "***"),
        ("my s3cr3t words", "my *** words"),
        ("/home/alice/deals 2026/train.jsonl", "train.jsonl"),
        ("/a/b differs from /c/d, said /e/f", "b differs from d, said f"),
    ],
)
def test_paths_lose_their_folders_and_secrets_their_value(text, clean):
    scrubber = Scrubber(["s3cr3t"], homes=[Path("/checkout")])
    assert scrubber.text(text) == clean
    assert scrubber.text(clean) == clean


def test_values_under_secret_keys_and_in_commands_are_masked_at_every_depth():
    value = {"a": [{"api_key": "x1"}], "command": ["run", "--set", "hub.token=x2"], "/home/alice/k": 1, "max_new_tokens": 3}
    assert Scrubber(homes=[]).value(value) == {
        "a": [{"api_key": "***"}],
        "command": ["run", "--set", "hub.token=***"],
        "k": 1,
        "max_new_tokens": 3,
    }


def test_texts_freed_of_secrets_only_keep_their_paths():
    assert Scrubber(["s3cr3t"]).only_secrets(["cd /usr/bin && echo s3cr3t"]) == ["cd /usr/bin && echo ***"]


def test_a_folder_is_not_taken_for_a_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    scrubber = Scrubber()
    assert public_name("models/llama", scrubber) == "llama"
    assert public_name(str(tmp_path / "models" / "llama"), scrubber) == "llama"
    assert public_name("meta/llama", scrubber) == "meta/llama"
    assert public_name("embedded:small", scrubber) == "embedded:small"

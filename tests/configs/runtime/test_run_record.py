"""The record beside every result: complete, and free of secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

from configs.runtime.run_record import describe_git, describe_hardware, write_run_record
from configs.schema.decoding import DecodeConfig


def git(folder, *arguments):
    identity = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.com"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_a_run_record_holds_everything_a_number_is_traced_by(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "eval/run.py", "--set", "seed=3"])
    path = write_run_record(tmp_path / "new" / "run", DecodeConfig(seed=3), seconds=1.5)
    record = json.loads(path.read_text())
    assert path == tmp_path / "new" / "run" / "run.json"
    assert list(record) == ["command", "started", "config", "versions", "git", "hardware", "seconds"]
    assert record["command"] == ["python", "eval/run.py", "--set", "seed=3"]
    assert DecodeConfig.model_validate(record["config"]) == DecodeConfig(seed=3)
    assert datetime.now(UTC) - datetime.fromisoformat(record["started"]) < timedelta(minutes=1)
    assert record["seconds"] == 1.5


def test_git_tells_the_commit_and_whether_the_tree_differs_from_it(tmp_path, monkeypatch):
    assert describe_git(tmp_path) == {"commit": None, "dirty": None}
    git(tmp_path, "init")
    assert describe_git(tmp_path) == {"commit": None, "dirty": None}
    git(tmp_path, "commit", "--allow-empty", "-m", "first")
    clean = describe_git(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "README.md").write_text("documents do not count")
    assert describe_git(tmp_path) == clean
    (tmp_path / "new").write_text("x")
    assert describe_git(tmp_path) == clean | {"dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_git() == {"commit": None, "dirty": None}


def test_gpus_are_read_from_nvidia_smi_and_a_machine_without_it_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    hardware = describe_hardware()
    assert hardware["gpus"] == []
    assert hardware["cpu"]
    assert 1 <= hardware["cores"] <= os.cpu_count()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 580.1'\necho 'NVIDIA A100, SXM, [N/A], 580.1'\n")
    tool.chmod(0o755)
    assert describe_hardware()["gpus"] == [
        {"name": "NVIDIA H200", "memory_bytes": 143771 * 2**20, "driver": "580.1"},
        {"name": "NVIDIA A100, SXM", "memory_bytes": None, "driver": "580.1"},
    ]

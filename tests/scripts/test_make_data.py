"""`scripts/make_data.py` run as a person runs it: as a script, from another folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.runtime.command import BAD_INPUT, run_command
from configs.schema.data import DataConfig
from distill.dataset.conversations import read_conversations
from scripts.make_data import main

ENTRY = Path(__file__).resolve().parents[2] / "scripts" / "make_data.py"


@pytest.fixture
def target_folder(tmp_path, tiny_llama, tiny_tokenizer):
    folder = tmp_path / "target"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def test_a_file_of_prompts_becomes_a_data_set(tmp_path, target_folder):
    lines = [json.dumps({"turns": [f"w{first} w{second}"]}) for first in range(6) for second in range(6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    settings = (
        f"target.name={target_folder}",
        "target.device=cpu",
        "prompts.source=file",
        "prompts.path=prompts.jsonl",
        "answers.max_new_tokens=4",
        "held_out_share=0.3",
        "output=made",
    )
    command = [sys.executable, str(ENTRY), *(part for setting in settings for part in ("--set", setting))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [row for name in ("train", "held_out") for row in read_conversations(tmp_path / "made" / f"{name}.jsonl")]
    assert len(rows) == 36
    assert all(1 <= len(row.answer_ids) <= 4 for row in rows)
    assert json.loads((tmp_path / "made" / "run.json").read_text())["config"]["held_out_share"] == 0.3


def test_a_malformed_prompt_file_is_one_sentence_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"turns": ["w1"]}\n{"turns": \n')
    settings = ("target.name=./nowhere", "prompts.source=file", "prompts.path=prompts.jsonl", "output=made")
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert run_command(DataConfig, main, description="", argv=arguments) == BAD_INPUT
    [complaint] = capsys.readouterr().err.strip().splitlines()
    assert complaint.startswith("error: prompt file prompts.jsonl, line 2: not JSON")
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]

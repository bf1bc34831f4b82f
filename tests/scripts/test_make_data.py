"""`scripts/make_data.py` in an empty folder: prompts become conversations, or one sentence says why not."""

import json
from pathlib import Path

import pytest

from configs.runtime.command import DONE, run_command
from configs.schema.data import DataConfig
from distill.dataset.conversations import read_conversations
from scripts.make_data import main


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs the command there on a file of prompts."""
    monkeypatch.chdir(tmp_path)

    def run(prompts, **settings):
        Path("prompts.jsonl").write_text(prompts)
        values = {"prompts.source": "file", "prompts.path": "prompts.jsonl", "output": "made", **settings}
        argv = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        return run_command(DataConfig, main, description="", argv=argv)

    return run


def test_a_file_of_prompts_becomes_a_data_set(run, tiny_run):
    lines = [json.dumps({"turns": [f"w{first} w{second}"]}) for first in range(6) for second in range(6)]
    target = {"target.name": tiny_run / "target", "target.device": "cpu"}
    assert run("\n".join(lines), **target, **{"answers.max_new_tokens": 4}, held_out_share=0.3) == DONE
    rows = [row for name in ("train", "held_out") for row in read_conversations(Path("made") / f"{name}.jsonl")]
    assert len(rows) == 36
    assert all(1 <= len(row.answer_ids) <= 4 for row in rows)
    assert json.loads(Path("made/run.json").read_text())["config"]["held_out_share"] == 0.3

"""Runs to look in on, without their stages: folders as a run leaves them, written by the code that writes a run's own."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from configs.runtime import terminal
from configs.runtime.files import write_json, write_text
from configs.runtime.terminal import PROGRESS_FILE, STAGE
from scripts.run.steps import Record
from train.loop.records import HELD_OUT, MetricsFile

STAGES = ("data", "train", "eval", "gate", "export")
MINUTES = {"data": 6.0, "train": 10.0, "eval": 3.0, "gate": 0.1, "export": 0.2}


class WatchedRun:
    """A run in a folder, whose stages begin and end as a test says."""

    def __init__(self, folder, stages=STAGES, minutes=MINUTES):
        write_text(folder / "draft.yaml", 'target: {name: "org/some-8b"}\noutput: "runs/x"\n')
        self.folder, self.record, self.under_way = folder, Record(folder, stages, minutes), {}

    def begin(self, name, minutes_ago=0.0):
        began = max([time.time() - 60 * minutes_ago, *(each["began"] for each in self.record.steps.values())])
        with patch.dict(os.environ), patch("scripts.run.steps.time", SimpleNamespace(time=lambda: began)):
            step = self.record.step(name, name)
            self.under_way[name] = step, step.__enter__()

    def end(self, name, code=0, *, done=True, minutes=1.0):
        if name not in self.under_way:
            self.begin(name, minutes)
        step, entry = self.under_way.pop(name)
        entry.update({"done": done} | ({} if code is None else {"code": code}))
        step.__exit__(None, None, None)

    @contextmanager
    def progress(self, stage, *arguments, **settings):
        """Yield what `configs.runtime.terminal.progress` does, in the environment of a stage of this run."""
        os.environ.update({PROGRESS_FILE: str(self.folder / "progress.json"), STAGE: stage})
        try:
            with terminal.progress(*arguments, **settings) as advance:
                yield advance
        finally:
            del os.environ[PROGRESS_FILE], os.environ[STAGE]

    def train_some(self, losses, taus):
        """Write a training's metrics: losses and tokens per target step by step."""
        (self.folder / "train").mkdir(exist_ok=True)
        file = MetricsFile(self.folder / "train", done_steps=0, evaluated_steps=0)
        for step, loss in losses.items():
            file.add(step, 1.0 * step, {"loss": loss, "acceptance": 0.5})
        for step, tau in taus.items():
            file.add(step, 1.0 * step, {f"{HELD_OUT}tokens_per_target_step": tau})

    def show(self, *texts):
        """Write samples of an evaluation, of each text an accepted piece, a rejected one, and one of the target's."""
        kinds = {"accepted": "", "rejected": " or not", "target": " and so on"}
        pieces = [[{"kind": kind, "text": each or text} for kind, each in kinds.items()] for text in texts]
        common = {"prompt_id": "p1/0", "category": "", "prompt": "What is it?", "tokens_per_target_step": 2.5}
        write_json(
            self.folder / "train" / "samples.json", {"step": 40, "samples": [common | {"pieces": each} for each in pieces]}
        )

    def age(self, minutes):
        """Let what was written be older."""
        then = time.time() - 60 * minutes
        for path in self.folder.rglob("*.*"):
            os.utime(path, (then, then))
        progress = self.folder / "progress.json"
        if progress.is_file():
            progress.write_text(json.dumps(json.loads(progress.read_text()) | {"time": then}))
            os.utime(progress, (then, then))

"""Commands of the project in forked processes, to be killed: the parent has imported everything, so a child starts at once."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from pydantic import BaseModel

from configs.runtime.command import run_command
from configs.runtime.files import write_json

FORK = multiprocessing.get_context("fork")
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Child:
    def __init__(
        self,
        main: Callable[..., Any],
        config: BaseModel,
        folder: Path,
        name: str = "child",
        before: Callable[[], None] | None = None,  # called in the child first: plants a fault there, and nowhere else
        environment: dict[str, str] | None = None,
    ) -> None:
        self.file, self.errors = folder / f"{name}.yaml", folder / f"{name}.stderr"
        write_json(self.file, config.model_dump(mode="json"))  # JSON is YAML
        self.main, self.schema, self.before, self.environment = main, type(config), before, environment or {}
        self._step = FORK.Value("i", 0)
        self.process = FORK.Process(target=self._work)
        self.process.start()

    @property
    def steps(self) -> int:
        return self._step.value

    def end(self, seconds: float = 120.0) -> int:
        """Wait for the child; return its exit code, negative for the signal that ended it."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.kill()
            raise TimeoutError(f"{self.file.stem} was still running after {seconds:.0f} s: {self.said[-2000:]}")
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    @property
    def said(self) -> str:
        return self.errors.read_text(errors="replace")

    def _work(self) -> None:
        with self.errors.open("wb") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        for name in RANKS:
            os.environ.pop(name, None)
        os.environ.update(self.environment)
        torch.set_num_threads(1)
        AcceleratorState._reset_state(reset_partial_state=True)
        if self.before is not None:
            self.before()
        argv = ["--config", str(self.file)]
        code = run_command(self.schema, self._followed, description="a child of a test", argv=argv)
        sys.stderr.flush()
        os._exit(code)

    def _followed(self, config: BaseModel) -> Any:
        logging.getLogger("draftsmith").addHandler(_StepCounter(self._step))
        return self.main(config)


class _StepCounter(logging.Handler):
    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("step %d/%d:") and isinstance(record.args, tuple):
            self.step.value = record.args[0]

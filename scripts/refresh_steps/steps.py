"""Steps in order, of which those that are finished are skipped.

A run that was cut off keeps what it has read of the log, also where the log has grown since; the next run after one that came
to a verdict, or ended for bad input, reads the log again. A step whose settings, or those of a step before it, changed begins
with its folder removed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.runtime.command import BAD_INPUT, DONE
from configs.runtime.errors import InputError
from configs.runtime.files import read_object, write_json
from configs.runtime.resumable import files_fingerprint, fingerprint

log = logging.getLogger("draftsmith")
RECORD = "steps.json"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a run.

    Args:
        name: in messages and the record.
        folder: that it alone writes.
        decided_by: JSON values that decide what it writes, besides the steps before it.
        run: does it and returns an exit code.
    """

    name: str
    folder: Path
    decided_by: Any
    run: Callable[[], int]


def run_steps(output: Path, steps: Sequence[Step], inputs: Sequence[Path]) -> int:
    """Run what is not finished; return the code of the first step that does not end with 0.

    Args:
        output: folder of the record.
        steps: in order.
        inputs: files and folders that grow or change between runs.
    """
    record = read_object(output / RECORD, "record of the steps") if (output / RECORD).is_file() else {}
    if record.get("ended", True):
        record |= {"inputs": files_fingerprint(inputs), "ended": False}
    finished, known = record.setdefault("finished", {}), record["inputs"]
    for step in steps:
        known = fingerprint(known, step.name, step.decided_by)
        if finished.get(step.name) == {"job": known, "done": True}:
            log.info("%s: already done", step.name)
            continue
        if finished.get(step.name, {}).get("job") != known:
            shutil.rmtree(step.folder, ignore_errors=True)
        finished[step.name] = {"job": known, "done": False}
        write_json(output / RECORD, record)
        log.info("== %s", step.name)
        try:
            code = step.run()
        except InputError:
            end(output)
            raise
        if code == BAD_INPUT:
            end(output)
        if code != DONE:
            log.error("stopped: %s ended with %d", step.name, code)
            return code
        finished[step.name]["done"] = True
        write_json(output / RECORD, record)
    return DONE


def end(output: Path) -> None:
    """Note that a run has ended: the next one reads its inputs again."""
    write_json(output / RECORD, read_object(output / RECORD, "record of the steps") | {"ended": True})

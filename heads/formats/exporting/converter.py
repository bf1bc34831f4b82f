"""Another project's converter: found on this machine, and run as a process on a folder that was written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.runtime.errors import InputError
from configs.runtime.files import downloads_folder


def find_converter(file: str, variable: str, usual: str, how: str) -> Path:
    """Return a converter's path: `file` in the folder that an environment variable names, else in the usual download.

    `how` tells the error what makes it.
    """
    named = os.environ.get(variable)
    converter = (Path(named) if named else downloads_folder() / "venvs" / usual).absolute() / file
    if not converter.is_file():
        raise InputError(
            f"{converter} is missing, which writes this form: {how}, or name its folder in the environment variable {variable}"
        )
    return converter


def run_converter(name: str, command: Sequence[str], made: Path, environment: Mapping[str, str]) -> None:
    """Run a converter that is to leave the file `made`; an InputError has the last line that it writes to stderr."""
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not made.is_file():
        words = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise InputError(f"{name} refuses it: {words}")

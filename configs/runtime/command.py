"""The frame of every command: read the arguments, load the config, turn errors into exit codes.

A command is a function `main(config)` and `sys.exit(run_command(EvalConfig, main, description=...))`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel

from configs.runtime.errors import InputError, Stopped
from configs.runtime.loading import load_config
from configs.runtime.progress import is_main_process, setup_logging
from configs.runtime.redaction import redact

DONE = 0
GATE_FAILED = 1
BAD_INPUT = 2
INCONCLUSIVE = 3
INTERRUPTED = 130  # what a shell reports for Ctrl-C
TERMINATED = 143  # what a shell reports for SIGTERM; training has written a checkpoint then
STOPPED_FILE = (
    "DRAFTSMITH_STOPPED_FILE"  # environment variable: a process that ends with TERMINATED adds a line to the file it names
)

EPILOG = "Exit codes: 0 done or pass, 1 gate failed, 2 bad input, 3 gate inconclusive, 143 stopped by SIGTERM (run it again)."


def run_command(
    schema: type[BaseModel],
    main: Callable[..., int | None],
    *,
    description: str,
    argv: Sequence[str] | None = None,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Run `main` on the config that the command line describes and return the process's exit code.

    A user's mistake (`InputError`, a wrong argument) is one line on stderr and `BAD_INPUT`; other errors keep their traceback.

    Args:
        schema: checks the config.
        main: called with the config, and with the parsed arguments after it where `add_arguments` is given; returns an exit
            code, None meaning done.
        description: the command in a sentence or two, for `--help`.
        argv: the arguments, without the program's name; None takes the process's own.
        add_arguments: adds the command's own arguments to the parser.
    """
    setup_logging()
    parser = _Parser(description=description, epilog=EPILOG, allow_abbrev=False)
    if add_arguments is not None:
        add_arguments(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file; without it, the defaults")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one setting of the file, e.g. decode.temperature=0.7; may be repeated",
    )
    try:
        arguments = parser.parse_args(argv)
        config = load_config(schema, arguments.config, arguments.overrides)
        code = main(config) if add_arguments is None else main(config, arguments)
    except InputError as error:
        _say(f"error: {error}")
        return BAD_INPUT
    except Stopped as stopped:
        _say(str(stopped))
        _note_stop(str(stopped))
        return TERMINATED
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    return DONE if code is None else code


def _note_stop(message: str) -> None:
    """Add the message to the file that `STOPPED_FILE` names: torchrun and accelerate lose the exit code of a process they end.

    A file that cannot be written changes no exit code.
    """
    if file := os.environ.get(STOPPED_FILE):
        try:
            with Path(file).open("a", encoding="utf-8") as stream:
                stream.write(message + "\n")
        except OSError as error:
            _say(f"{STOPPED_FILE}: cannot write {file}: {error.strerror or error}")


class _Parser(argparse.ArgumentParser):
    """Raises on a wrong argument, where argparse prints the usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise an `InputError`."""
        raise InputError(f"{message} (see {self.prog} --help)")


def _say(message: str) -> None:
    """Print one line on stderr, from the main process only."""
    if is_main_process():
        print(redact(" ".join(message.split())), file=sys.stderr)

"""The frame of every command: read the arguments, load the config, turn errors into exit codes.

A command is a function `main(config)` and `sys.exit(run_command(EvalConfig, main, description=...))`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from configs.runtime.errors import BAD_INPUT, FAILED, INTERRUPTED, InputError, RunFailed, Stopped, first_line, keep_freed_memory
from configs.runtime.files import out_of_space
from configs.runtime.loading import load_config, render_config, render_keys
from configs.runtime.terminal import is_main_process, one_line, say, setup_logging, show

DONE = 0
GATE_FAILED = 1
INCONCLUSIVE = 3
TERMINATED = 143  # what a shell reports for SIGTERM; training has written a checkpoint then
# Environment variable: a command that does not end well writes its exit code there; torchrun and accelerate end with 1 then.
EXIT_CODE_FILE = "DRAFTSMITH_EXIT_CODE_FILE"

MINUTES = {"s": 1 / 60, "m": 1.0, "h": 60.0}
OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
EPILOG = (
    "Exit codes: 0 done or pass, 1 gate failed, 2 bad input or a full disk, 3 gate inconclusive, 70 the run failed (a loss "
    "that is not finite, a lost process, an error in draftsmith), 143 stopped by SIGTERM (run it again)."
)


def run_command(
    schema: type[BaseModel],
    main: Callable[..., int | None],
    *,
    description: str,
    argv: Sequence[str] | None = None,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Run `main` on the config that the command line describes and return the process's exit code (see `exit_code`).

    Where `add_arguments` adds the command's own to the parser, `main` is called with the parsed arguments too.
    """
    setup_logging()
    keep_freed_memory()
    parser = Parser(description=description, epilog=EPILOG, allow_abbrev=False)
    if add_arguments is not None:
        add_arguments(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file; without it, the defaults")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change settings of the file, e.g. decode.temperature=0.7 decode.seed=1; may be repeated",
    )
    parser.add_argument("--print-config", action="store_true", help="print the config with all defaults as YAML and end")
    keys = "print every key (that begins with PREFIX) with its type, default and meaning, and end"
    parser.add_argument("--keys", metavar="PREFIX", nargs="?", help=keys)

    def run() -> int | None:
        given = _repeat_set(sys.argv[1:] if argv is None else argv)
        if "--keys" in given:  # before other arguments are missed
            show(render_keys(schema, *given[given.index("--keys") + 1 :][:1]))
            return DONE
        arguments = parser.parse_args(given)
        config = load_config(schema, arguments.config, arguments.overrides)
        if arguments.print_config:
            show(render_config(config))
            return DONE
        return main(config) if add_arguments is None else main(config, arguments)

    code = exit_code(run)
    if code and (path := os.environ.get(EXIT_CODE_FILE)):
        with suppress(OSError):
            Path(path).write_text(str(code), encoding="ascii")
    return code


def minutes(time: str, option: str) -> float:
    """Return the minutes of a time such as 90s, 30m or 1.5h; errors name the option that gave it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", time)
    if found is None or not float(found[1]):
        raise InputError(f"{option} must be a time above 0 such as 90s, 30m or 1.5h, got {time}")
    return float(found[1]) * MINUTES[found[2]]


def exit_code(run: Callable[[], int | None]) -> int:
    """Run a command and return its exit code, None meaning done.

    A user's mistake (`InputError`, a wrong argument) and a full disk are one line on stderr and `BAD_INPUT`, a run that cannot
    go on (`RunFailed`) is one line and `FAILED`, any other error its traceback and `FAILED`: Python's own, 1, is the gate's.
    """
    try:
        code = run()
    except InputError as error:
        _say(f"error: {error}")
        return BAD_INPUT
    except Stopped as stopped:
        _say(str(stopped))
        return TERMINATED
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except RunFailed as error:
        say(one_line(f"error: {error}"), sys.stderr)  # from every process: it may be the only one that knows
        return FAILED
    except Exception as error:
        if out_of_space(error):
            place = getattr(error, "filename", None) or "a file"
            _say(f"error: cannot write {place}: {first_line(error)}; free space there, or name a folder on another disk")
            return BAD_INPUT
        sys.excepthook(type(error), error, error.__traceback__)
        return FAILED
    return DONE if code is None else code


def _repeat_set(argv: Sequence[str]) -> list[str]:
    """Put `--set` before each of several `KEY=VALUE` that follow one."""
    repeated: list[str] = []
    for argument in argv:
        follows = len(repeated) > 1 and repeated[-2] == "--set" and OVERRIDE.match(argument)
        repeated += ["--set", argument] if follows else [argument]
    return repeated


class Parser(argparse.ArgumentParser):
    """Raises on a wrong argument, where argparse prints the usage and exits."""

    def print_help(self, file: Any = None) -> None:
        show(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


def _say(message: str) -> None:
    """Print one line on stderr, from the main process only."""
    if is_main_process():
        say(one_line(message), sys.stderr)

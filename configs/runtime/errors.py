"""Errors that every command turns into one line on stderr and an exit code: a mistake, a failed run, a stop on request."""

from __future__ import annotations


class InputError(ValueError):
    """A file, folder or value given by the user cannot be used. The message says what is wrong and what is accepted."""


class ConfigError(InputError):
    """A configuration file or a `--set` override is wrong. The message names the key, the value got, and what is accepted."""


class RunFailed(RuntimeError):
    """A run cannot go on, and its input is not known to be wrong: a loss that is not finite, a process that was lost.

    The message says all there is to say, so that a command prints it without a traceback.
    """


class Stopped(Exception):
    """The process was asked to end (SIGTERM) and has saved its work; the message says how to go on."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, or the error's type where the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

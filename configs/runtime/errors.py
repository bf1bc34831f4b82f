"""The two kinds of mistake a user can make. Entries turn both into one sentence on stderr and exit code 2."""

from __future__ import annotations


class InputError(ValueError):
    """Something the user handed in cannot be used: a file, a folder, a value. The message says what, and what would do."""


class ConfigError(InputError):
    """A configuration file or a `--set` override is wrong. The message names the key, the value got, and what is accepted."""


class Stopped(Exception):
    """The process was asked to end (SIGTERM) and did so in good order; the message says how to go on."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's complaint, to be quoted in one of ours; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

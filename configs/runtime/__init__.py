"""What every command shares: files, locks, progress, the record of a run, and errors turned into exit codes.

A command enters at `run_command`, which loads its config (`load_config`) and reports a mistake of the user's in one sentence.
"""

from configs.runtime.command import run_command
from configs.runtime.errors import ConfigError, InputError
from configs.runtime.loading import load_config

__all__ = ["ConfigError", "InputError", "load_config", "run_command"]

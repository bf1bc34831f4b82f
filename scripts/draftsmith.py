"""`draftsmith COMMAND ...`: the commands under one name, for those who installed the wheel; `draftsmith --help` lists them.

Each runs the module that the checkout has a file for, in this process: to train in several, give that file to
`accelerate launch`. `eval "$(draftsmith completion bash)"` completes commands and config keys in bash, and in zsh after
`autoload -U bashcompinit && bashcompinit`.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.startup import guard_imports

    guard_imports()

from pydantic import BaseModel

from configs.runtime.command import BAD_INPUT, DONE, exit_code
from configs.runtime.key_list import list_keys
from configs.schema.commands.advising import AdviceConfig
from configs.schema.commands.planning import PlanHeadsConfig
from configs.schema.commands.refreshing import RefreshConfig
from configs.schema.commands.release import ExportConfig, ImportConfig, PushConfig
from configs.schema.data import CacheConfig, DataConfig
from configs.schema.evaluation import CompareConfig, EvalConfig, GateConfig
from configs.schema.training import DistillConfig, HeadsConfig

# Command -> the module it runs and the schema of its config, if it takes one.
COMMANDS: dict[str, tuple[str, type[BaseModel] | None]] = {
    "demo": ("scripts.demo", None),
    "plan": ("scripts.plan", PlanHeadsConfig),
    "advise": ("scripts.advise", AdviceConfig),
    "data": ("scripts.make_data", DataConfig),
    "cache": ("scripts.make_cache", CacheConfig),
    "distill": ("train.distill", DistillConfig),
    "heads": ("train.heads", HeadsConfig),
    "eval": ("eval.run", EvalConfig),
    "compare": ("eval.compare", CompareConfig),
    "gate": ("eval.gate", GateConfig),
    "refresh": ("scripts.refresh", RefreshConfig),
    "export": ("scripts.export", ExportConfig),
    "import": ("scripts.import", ImportConfig),
    "push": ("scripts.push", PushConfig),
}
OPTIONS = ("--config", "--set", "--keys", "--print-config", "--help")
COMPLETION = """_draftsmith() {
  local words="$(draftsmith complete "${COMP_WORDS[@]:1:COMP_CWORD}")"
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
  [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
}
complete -o default -F _draftsmith draftsmith"""


def main() -> int:
    """Run the command that the arguments name and return its exit code."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return DONE
    if name == "completion" and rest == ["bash"]:
        print(COMPLETION)
        return DONE
    if name == "complete":
        print("\n".join(complete(rest)))
        return DONE
    if name not in COMMANDS:
        print(f"error: no command {name!r}; there are {', '.join(COMMANDS)} and completion bash", file=sys.stderr)
        return BAD_INPUT
    sys.argv = [f"draftsmith {name}", *rest]

    def run() -> None:
        runpy.run_module(COMMANDS[name][0], run_name="__main__")

    try:
        return exit_code(run)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else DONE


def complete(words: list[str]) -> list[str]:
    """Return what may stand in the place of the last of `words`, the arguments so far."""
    if len(words) < 2:
        return list(COMMANDS)
    _, schema = COMMANDS.get(words[0], ("", None))
    if schema is None or "--set" not in words[:-1] or words[-1].startswith("-"):
        return list(OPTIONS) if words[-1].startswith("-") else []
    return [f"{key.path}=" for key in list_keys(schema)]


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {_summary(schema)}" for name, (_, schema) in COMMANDS.items()]
    return "\n".join(["usage: draftsmith COMMAND [--config FILE] [--set KEY=VALUE ...]", "", *lines])


def _summary(schema: type[BaseModel] | None) -> str:
    """Return what a schema's docstring says of its command, without the name of the file."""
    if schema is None:
        return "data, training, evaluation and gate at once, on a small model or on --target"
    return re.sub(r"^`[^`]*`: ", "", (schema.__doc__ or "").partition("\n")[0])


if __name__ == "__main__":
    sys.exit(main())

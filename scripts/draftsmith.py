"""`draftsmith COMMAND ...`: the commands under one name, for those who installed the wheel; `draftsmith --help` lists them.

`draftsmith STAGE draft.yaml` runs a stage of a run (`scripts/run`). Any other command runs the module that the checkout has
a file for, in this process: to train in several, give that file to `accelerate launch`.
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
from configs.schema.commands.planning import PlanHeadsConfig
from configs.schema.commands.refreshing import RefreshConfig
from configs.schema.commands.release import CheckConfig, ExportConfig, ImportConfig, PushConfig
from configs.schema.commands.running import STAGES, RunConfig
from configs.schema.data import CacheConfig, DataConfig
from configs.schema.evaluation import CompareConfig, EvalConfig, GateConfig
from configs.schema.training import DistillConfig, HeadsConfig

# Command -> the module it runs, and the schema of its config, or in words what it does.
COMMANDS: dict[str, tuple[str, type[BaseModel] | str]] = {
    "run": ("scripts.run.__main__", RunConfig),
    "plan": ("scripts.plan", PlanHeadsConfig),
    "data": ("scripts.data", DataConfig),
    "cache": ("scripts.cache", CacheConfig),
    "distill": ("train.distill", DistillConfig),
    "heads": ("train.heads", HeadsConfig),
    "eval": ("eval.run", EvalConfig),
    "compare": ("eval.compare", CompareConfig),
    "gate": ("eval.gate", GateConfig),
    "refresh": ("scripts.refresh", RefreshConfig),
    "export": ("scripts.export", ExportConfig),
    "check": ("scripts.check", CheckConfig),
    "import": ("scripts.import", ImportConfig),
    "push": ("scripts.push", PushConfig),
    "watch": ("scripts.watching", "how far a run is, what it has found so far, and what it came to"),
    "doctor": ("scripts.doctor", "what this machine has, and what is missing for what"),
}


def main() -> int:
    """Run the command that the arguments name and return its exit code."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: draftsmith COMMAND [--config FILE] [--set KEY=VALUE ...]\n")
        for command, (_, schema) in COMMANDS.items():
            print(f"  {command:8}  {_summary(schema)}")
        return DONE
    if name in STAGES and rest and rest[0].endswith((".yaml", ".yml")):
        name, rest = "run", [*rest, "--stage", name]
    if name not in COMMANDS:
        print(f"error: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return BAD_INPUT
    sys.argv = [f"draftsmith {name}", *rest]

    def run() -> None:
        runpy.run_module(COMMANDS[name][0], run_name="__main__")

    try:
        return exit_code(run)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else DONE


def _summary(schema: type[BaseModel] | str) -> str:
    """Return what a schema's docstring says of its command, without the name of the file."""
    if isinstance(schema, str):
        return schema
    return re.sub(r"^`[^`]*`: ", "", (schema.__doc__ or "").partition("\n")[0])


if __name__ == "__main__":
    sys.exit(main())

"""`draftsmith COMMAND ...`: a command is a file or folder of its name here, or an entry of train/ or eval/.

`draftsmith STAGE draft.yaml` runs a stage of a run. Any other command runs its module in this process, as `python -m MODULE`
does; to train in several, give `train/distill.py` or `train/heads.py` to `accelerate launch`.
"""

from __future__ import annotations

import runpy
import sys

from configs.runtime.errors import BAD_INPUT, guard_imports

# Command -> the module it runs, and what it does.
COMMANDS = {
    "run": ("scripts.run.__main__", "train a draft for a model within a budget, judge it and export it"),
    "plan": ("scripts.plan", "the memory and time that a recipe takes"),
    "data": ("scripts.data", "prompts, answered by the target, split into train and held-out"),
    "cache": ("scripts.cache", "the target's outputs, once for all epochs"),
    "distill": ("train.distill", "train a draft LM"),
    "heads": ("train.heads", "train a head"),
    "eval": ("eval.run", "measure a draft against plain decoding on your prompts"),
    "compare": ("eval.compare", "two reports side by side, with intervals"),
    "gate": ("eval.gate", "judge a report by a release's rules"),
    "export": ("scripts.export", "write a draft in the form that an engine serves"),
    "check": ("scripts.check.__main__", "serve an export in its engine, with the draft and without"),
    "serve-states": ("scripts.serve_states", "print the lines that start servers of hidden states for a recipe"),
    "import": ("scripts.import_draft", "turn another program's draft into an artifact"),
    "push": ("scripts.push.__main__", "publish a draft on the Hub, with its report and a model card"),
    "watch": ("scripts.watch.__main__", "show how far a run is, and what it came to"),
    "doctor": ("scripts.doctor", "what this machine has, and what is missing for what"),
}


def main() -> int:
    """Run the command that the arguments name and return its exit code."""
    guard_imports()
    from configs.runtime.command import DONE, exit_code
    from configs.schema.commands.running import STAGES

    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: draftsmith COMMAND [--config FILE] [--set KEY=VALUE ...]\n")
        print("\n".join(f"  {command:12}  {what}" for command, (_, what) in COMMANDS.items()))
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


if __name__ == "__main__":
    sys.exit(main())

"""Publish an artifact on the Hub: `draftsmith push ARTIFACT --report report.json --repo-id OWNER/NAME`.

Makes a repository, private by default, with the artifact, its exports, the report and a model card made from it. `--dry-run
DIR` writes the same files into a folder without any network access. docs/releasing.md lists what is refused. Ends with 1 or 3
where the gate (`draftsmith gate`) failed the report or was inconclusive, unless `allow_failed_gate` is set.
"""

from __future__ import annotations

import argparse
import sys

from configs.runtime.command import run_command
from configs.schema.commands.release import PushConfig


def main(config: PushConfig, args: argparse.Namespace) -> int:
    """Check, gather, push; return the exit code."""
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from scripts.push.publish import publish

    return publish(config, args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    add = parser.add_argument
    add("artifact", metavar="ARTIFACT", help="folder written by training or draftsmith import")
    add("--report", metavar="FILE", required=True, help="report.json of this artifact, written by draftsmith eval")
    add("--repo-id", metavar="OWNER/NAME", required=True, help="the repository; without OWNER, your own")
    add("--target", metavar="NAME", help="folder or Hub id of the target, for exports; default: as the artifact says")
    add("--dry-run", metavar="DIR", help="write what would be pushed into a new folder; no network")


if __name__ == "__main__":
    description = "Publish a draft with its report and a model card on the Hub."
    sys.exit(run_command(PushConfig, main, description=description, add_arguments=add_arguments))

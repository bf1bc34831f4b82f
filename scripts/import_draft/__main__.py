"""Turn another program's draft into an artifact: `draftsmith import DRAFT --out DIR --set target.name=NAME`.

Reads the forms of speculators, SGLang and SpecForge (EAGLE-3), Medusa, z-lab and transformers (DFlash), and the MTP
modules of a checkpoint. A few prompts are decoded with it before anything is written: a draft that the target never accepts is
refused, and so is one whose acceptance is higher when its config is read as other hidden states.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from configs.runtime.command import run_command
from configs.runtime.errors import InputError
from configs.runtime.terminal import say
from configs.schema.commands.release import ImportConfig


def main(config: ImportConfig, args: argparse.Namespace) -> None:
    """Read the draft, fit it to the target, try it, write the artifact."""
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from configs.runtime.run_record import describe_versions
    from heads.formats.importing.importer import write_artifact
    from heads.frozen.loading import load_target
    from heads.metadata import locate_external
    from scripts.import_draft.trial import read_and_fit, try_out

    out = Path(args.out)
    if out.exists():
        raise InputError(f"{out} exists already; give a new folder")
    folder, target = locate_external(args.draft), load_target(config.target)
    external, fitted, tokens = read_and_fit(folder, config, target)
    provenance = {"imported_from": args.draft, "form": external.form, "versions": describe_versions()}
    said = f"{out}: {fitted.settings.kind} from {external.form}"
    if config.min_accepted_per_round > 0:
        provenance["accepted_per_round"] = accepted = try_out(folder, config, target, external, fitted, tokens)
        said += f", {accepted:.2f} accepted a round"
    write_artifact(fitted, out, target, num_speculative_tokens=tokens, provenance=provenance)
    say(said)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument(
        "draft", metavar="DRAFT", help="folder with the draft's config.json and weights, or OWNER/NAME on the Hub"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="the artifact to make")


if __name__ == "__main__":
    description = "Turn a draft that another program wrote into an artifact."
    sys.exit(run_command(ImportConfig, main, description=description, add_arguments=add_arguments))

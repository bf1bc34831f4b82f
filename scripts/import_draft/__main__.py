"""Turn another program's draft into an artifact: `draftsmith import DRAFT --out DIR --set target.name=NAME`.

Reads the forms of speculators, SGLang and SpecForge (EAGLE-3), Medusa, z-lab and transformers (DFlash), and the MTP
modules of a checkpoint. A few prompts are decoded with it before anything is written: a draft that the target never accepts is
refused, and so is one whose acceptance is higher when its config is read as other hidden states.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from configs.runtime.command import run_command
from configs.runtime.errors import InputError
from configs.runtime.terminal import say
from configs.schema.commands.release import ImportConfig


def main(config: ImportConfig, args: argparse.Namespace) -> None:
    """Read the draft, fit it to the target, try it, write the artifact."""
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from configs.runtime.run_record import describe_versions
    from heads.formats.importing.importer import drafts_a_round, fit, write_artifact
    from heads.formats.importing.reading import read_external
    from heads.frozen.loading import load_target
    from heads.metadata import locate_external
    from scripts.import_draft.trial import try_out

    out = Path(args.out)
    if out.exists():
        raise InputError(f"{out} exists already; give a new folder")
    folder = locate_external(args.draft)
    external = read_external(folder, layer_ids=config.layer_ids, reads=config.reads)
    target = load_target(config.target)
    try:
        fitted = fit(external, target.model)
    except InputError as error:
        raise InputError(f"{folder} ({external.form}) does not fit {config.target.name}: {error}") from error
    tokens = drafts_a_round(external, config.num_speculative_tokens, fitted.settings)
    trial = try_out(fitted, target, config, tokens, external.layer_ids)
    for warning in [] if trial is None else trial.warnings:
        say(f"{folder}: {warning}", sys.stderr)
    provenance = {
        "imported_from": args.draft,
        "form": external.form,
        "versions": describe_versions(),
        "trial": None if trial is None else asdict(trial),
    }
    write_artifact(fitted, out, target, num_speculative_tokens=tokens, provenance=provenance)
    say(
        f"{out}: {fitted.settings.kind} from {external.form}"
        + ("" if trial is None else f", {trial.accepted_per_round:.2f} accepted a round")
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument(
        "draft", metavar="DRAFT", help="folder with the draft's config.json and weights, or OWNER/NAME on the Hub"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="the artifact to make")


if __name__ == "__main__":
    description = "Turn a draft that another program wrote into an artifact."
    sys.exit(run_command(ImportConfig, main, description=description, add_arguments=add_arguments))

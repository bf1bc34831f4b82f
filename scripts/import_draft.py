"""Turn another program's draft into an artifact: `draftsmith import DRAFT --out DIR --set target.name=NAME`.

Reads the forms of speculators, SGLang and SpecForge (EAGLE-3), Medusa, z-lab and transformers (DFlash), and the MTP
modules of a checkpoint. A few prompts are decoded with it before anything is written: a draft that the target never accepts is
refused. Programs count the ids of hidden states in two ways, one apart, and MTP modules read the last state before or after the
final norm: `layer_ids` and `reads` say which.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.runtime.command import run_command
from configs.runtime.errors import InputError
from configs.runtime.terminal import say
from configs.schema.commands.release import ImportConfig

if TYPE_CHECKING:
    from heads.formats.importing.importer import Fitted
    from heads.frozen.loading import Target


def main(config: ImportConfig, args: argparse.Namespace) -> None:
    """Read the draft, fit it to the target, try it, write the artifact."""
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from configs.runtime.run_record import describe_versions
    from heads.formats.importing.importer import drafts_a_round, fit, write_artifact
    from heads.formats.importing.reading import read_external
    from heads.frozen.loading import load_target
    from heads.metadata import locate_external

    out = Path(args.out)
    if out.exists():
        raise InputError(f"{out} exists already; give a new folder")
    folder, target = locate_external(args.draft), load_target(config.target)
    external = read_external(folder, layer_ids=config.layer_ids, reads=config.reads)
    try:
        fitted = fit(external, target.model)
    except InputError as error:
        raise InputError(f"{folder} ({external.form}) does not fit {config.target.name}: {error}") from error
    tokens = drafts_a_round(external, config.num_speculative_tokens, fitted.settings)
    provenance = {"imported_from": args.draft, "form": external.form, "versions": describe_versions()}
    said = f"{out}: {fitted.settings.kind} from {external.form}"
    if config.min_accepted_per_round > 0:
        provenance["accepted_per_round"] = accepted = accepted_per_round(fitted, target, config, tokens)
        if accepted < config.min_accepted_per_round:
            raise InputError(
                f"{folder}: the target accepts {accepted:.3f} drafts a round on {len(config.prompts)} prompts, below "
                f"min_accepted_per_round {config.min_accepted_per_round:g}: the draft is another target's, or its config means "
                "other states: try --set layer_ids=h and layer_ids=block_output, of MTP reads=pre_norm and reads=post_norm"
            )
        said += f", {accepted:.2f} accepted a round"
    write_artifact(fitted, out, target, num_speculative_tokens=tokens, provenance=provenance)
    say(said)


def accepted_per_round(fitted: Fitted, target: Target, config: ImportConfig, num_speculative_tokens: int) -> float:
    """Decode the config's prompts with a draft; return how many drafts stay a round on average."""
    from configs.schema.decoding import DecodeConfig
    from eval.decoder.decode import Request, decode
    from heads.families.registry import FAMILIES, serve

    family = FAMILIES[fitted.settings.kind]
    head: Any = family.build(fitted.settings, target.model, fitted.vocabulary)
    for name, value in head.state_dict().items():  # one after another: only one tensor is in memory twice
        value.copy_(fitted.weights[name])
    settings = DecodeConfig(num_speculative_tokens=num_speculative_tokens, max_new_tokens=config.max_new_tokens)
    prompts = [target.encode_chat([{"role": "user", "content": prompt}]) for prompt in config.prompts]
    requests = [Request(prompt_id=str(number), category="", tokens=tuple(tokens)) for number, tokens in enumerate(prompts)]
    generations, _ = decode(target, requests, settings, family.propose(serve(head, target.model), target.device))
    accepted = [each.num_accepted for generation in generations for each in generation.rounds]
    return sum(accepted) / len(accepted) if accepted else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    what = "folder with the draft's config.json and weights, or OWNER/NAME on the Hub"
    parser.add_argument("draft", metavar="DRAFT", help=what)
    parser.add_argument("--out", metavar="DIR", required=True, help="the artifact to make")


if __name__ == "__main__":
    description = "Turn a draft that another program wrote into an artifact."
    sys.exit(run_command(ImportConfig, main, description=description, add_arguments=add_arguments))

"""Write trained MTP modules into a copy of their target.

`python scripts/exchange/stitch_mtp.py ARTIFACT --target FOLDER --out DIR`

In the copy only the MTP tensors differ, for engines that load them from the target's checkpoint; `run.json` is written beside
them. The target must have MTP weights of its own; for others there is scripts/export.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.runtime.errors import InputError, first_line
from configs.runtime.run_record import write_run_record
from configs.schema.heads import MtpSettings
from configs.schema.training import StitchConfig


def main(config: StitchConfig, args: argparse.Namespace) -> None:
    """Check that artifact and folder belong together, and stitch."""
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from pydantic import ValidationError
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from heads.artifact import WEIGHTS_FILE, read_metadata
    from heads.frozen.identity import hash_weights
    from heads.frozen.mtp_checkpoint import NativeMtp
    from heads.hub import locate_artifact

    artifact, folder, out = locate_artifact(args.artifact), Path(args.target), Path(args.out)
    metadata = read_metadata(artifact)
    if metadata.kind != "mtp":
        raise InputError(f"{artifact} holds a draft of kind {metadata.kind!r}; only mtp can be stitched into a checkpoint")
    try:
        settings = MtpSettings.model_validate(metadata.head)
        tensors = load_file(artifact / WEIGHTS_FILE)
    except (OSError, SafetensorError, ValidationError) as error:
        raise InputError(f"{artifact} is damaged: {first_line(error)}") from error
    if settings.train_head:
        raise InputError(
            f"{artifact} has an output head of its own (head.train_head true), which the checkpoint has no place for"
        )
    native = NativeMtp(folder)
    if not config.allow_target_mismatch and hash_weights(folder) != metadata.target.get("weights_sha256"):
        raise InputError(
            f"{artifact} was trained for {metadata.target.get('name')}, and the weights in {folder} are others "
            "(--set allow_target_mismatch=true stitches nevertheless)"
        )
    modules = {name: value for name, value in tensors.items() if name.startswith("layers.")}
    native.stitch(modules, out, hidden_first=settings.concat_order == "hidden_first")
    write_run_record(out, config, artifact=str(artifact), target=str(folder))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("artifact", metavar="ARTIFACT", help="folder of an mtp head, written by train/heads.py")
    parser.add_argument("--target", metavar="FOLDER", required=True, help="the target it was trained for, with MTP weights")
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to make")


if __name__ == "__main__":
    description = "Put trained MTP modules into a copy of the target's checkpoint."
    sys.exit(run_command(StitchConfig, main, description=description, add_arguments=add_arguments))

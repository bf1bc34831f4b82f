"""Write an artifact in the form that an engine serves: `draftsmith export ARTIFACT --to vllm --out DIR`.

Writes a folder with config, weights and `serve.txt`, the command that serves it. The target is found by its name and
revision in the artifact; `--target` gives another folder or Hub id of it. A data file in place of an artifact, such as the
`train.jsonl` of its training, is written as suffix lookup that knows its answers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from configs.runtime.command import run_command
from configs.runtime.terminal import say
from configs.schema.commands.release import ENGINES, ExportConfig


def main(config: ExportConfig, args: argparse.Namespace) -> None:
    """Find the target, read the artifact, write the folder."""
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    import torch

    from configs.runtime.errors import InputError
    from configs.schema.training import TargetConfig
    from distill.dataset.conversations import first_answers, target_of
    from heads.formats.exporting.exporter import SERVE_FILE, export, export_suffix_lookup
    from heads.formats.exporting.source import TargetFolder, read_source
    from heads.frozen.identity import hash_tokenizer, locate
    from heads.frozen.tokenizer import load_tokenizer
    from heads.metadata import locate_artifact, read_metadata
    from heads.proposers.suffixes import KNOWN_TOKENS

    data, out = Path(args.artifact), Path(args.out)
    artifact = None if data.suffix == ".jsonl" else locate_artifact(args.artifact)
    known = target_of(data) if artifact is None else read_metadata(artifact).target
    name = args.target or known.get("name", "")
    revision = None if args.target else known.get("revision")
    settings = TargetConfig(name=name, revision=revision, trust_remote_code=config.trust_remote_code)
    folder = locate(settings)
    if folder.is_file():
        raise InputError(
            f"--target: {folder} is a single file, and an export needs a folder with config and safetensors, or a Hub id: give "
            "the checkpoint that the file was made from, with --set allow_target_mismatch=true, as it is not rounded alike"
        )
    is_hub_id = not Path(name).exists() and not name.startswith("embedded:")
    target_name = name if is_hub_id and revision is None else str(folder.resolve())  # which is of the revision in every engine
    target = TargetFolder(folder, target_name, config.trust_remote_code)
    if artifact is None:
        tokenizer = load_tokenizer(folder, settings)
        if hash_tokenizer(tokenizer) != known.get("tokenizer_sha256") and not config.allow_target_mismatch:
            raise InputError(
                f"{data} was written by {known.get('name')}, and the tokenizer of {folder} is another "
                "(--set allow_target_mismatch=true exports it anyway)"
            )
        answers = first_answers(data, KNOWN_TOKENS)
        export_suffix_lookup(answers, target, out, engine=args.to, num_speculative_tokens=config.num_speculative_tokens)
        say((out / SERVE_FILE).read_text(encoding="utf-8").rstrip())
        return
    source = read_source(
        artifact,
        target,
        num_speculative_tokens=config.num_speculative_tokens,
        dtype=None if config.dtype is None else getattr(torch, config.dtype),
    )
    export(source, args.to, out, allow_target_mismatch=config.allow_target_mismatch)
    say((out / SERVE_FILE).read_text(encoding="utf-8").rstrip())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument(
        "artifact",
        metavar="ARTIFACT",
        help="folder written by train/distill.py or train/heads.py, or OWNER/NAME on the Hub; a data file: suffix lookup",
    )
    parser.add_argument("--to", choices=ENGINES, required=True, help="the engine that is to load it")
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to make")
    parser.add_argument("--target", metavar="NAME", help="folder or Hub id of the target; default: as the artifact says")


if __name__ == "__main__":
    description = "Write a draft in the form that an engine serves."
    sys.exit(run_command(ExportConfig, main, description=description, add_arguments=add_arguments))

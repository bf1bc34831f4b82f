"""The steps of `draftsmith push`: judge what lies here, make what is published of it, write or push that."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from configs.runtime.command import DONE, GATE_FAILED, INCONCLUSIVE
from configs.runtime.errors import InputError, first_line
from configs.runtime.files import new_folder
from configs.runtime.redaction import hide
from configs.runtime.terminal import one_line, say
from configs.schema.commands.release import HUB_ID, PushConfig
from configs.schema.target import TargetConfig
from eval.release.verdict import as_table
from heads.formats.exporting.exporter import SERVE_FILE, export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.frozen.identity import fetch, locate
from scripts.push.card import agreed_licence, make_card, read_card
from scripts.push.checks import Release, read_release
from scripts.push.files import complete, name_for_engines, public_name, put_artifact, put_model
from scripts.push.upload import full_name, push

REFUSED = {"fail": GATE_FAILED, "inconclusive": INCONCLUSIVE}


def publish(config: PushConfig, args: argparse.Namespace) -> int:
    """Publish an artifact, or write what would be published, by the arguments of `draftsmith push`; return the exit code."""
    try:
        validate_repo_id(args.repo_id)
    except HFValidationError as error:
        raise InputError(f"--repo-id {args.repo_id}: {first_line(error)}") from error
    release = read_release(Path(args.artifact), Path(args.report), config)
    outcome = release.verdict.outcome
    if outcome != "pass" and not config.allow_failed_gate:
        say(as_table(release.verdict))
        say(f"nothing was published: the gate says {outcome} (--set allow_failed_gate=true publishes it anyway)", sys.stderr)
        return REFUSED[outcome]
    api = HfApi()
    online = args.dry_run is None
    if not online and Path(args.dry_run).exists():
        raise InputError(f"{args.dry_run} exists already; give a new folder")
    repo_id = full_name(api, args.repo_id) if online else args.repo_id
    with tempfile.TemporaryDirectory() if online else new_folder(Path(args.dry_run)) as made:
        folder = Path(made)
        left_out = _fill(folder, release, config, api, repo_id, args.target, online)
        if online:
            done = push(api, repo_id, folder, config)
        else:
            done = f"{args.dry_run}: the files, as they would be pushed to {repo_id}"
    if left_out:
        say(one_line(f"not published: {', '.join(left_out)}"))
    say(done)
    return DONE


def _fill(
    folder: Path, release: Release, config: PushConfig, api: HfApi, repo_id: str, target: str | None, online: bool
) -> list[str]:
    """Put everything that is to be published into an empty folder; return the names of files that are left out."""
    known = release.metadata.target
    name, revision = (target, None) if target is not None else (str(known["name"]), known.get("revision"))
    if token := get_token():
        hide(token)
    cleaned, left_out = put_artifact(folder, release, config)
    origins = {cleaned.metadata["target"]["name"]: read_card(name, revision, online=online)}
    student = release.metadata.training.get("student")
    if isinstance(student, Mapping) and student.get("init") == "model":  # a draft LM that began as another model
        initial = str(student["path"])
        origins[public_name(initial)] = read_card(initial, None, online=online)
    if config.license is None and agreed_licence(origins.values()) is None:
        say(one_line(f"license: other, as the cards of {', '.join(origins)} do not name one; --set license=... states it"))
    if config.exports:
        target_folder = TargetFolder(_locate_target(name, revision, online), name_for_engines(cleaned, config))
        source = read_source(release.folder, target_folder)
    for engine in config.exports:
        with tempfile.TemporaryDirectory() as scratch:
            exported = Path(scratch) / engine
            layout = export(source, engine, exported, served_from=f"{repo_id.split('/')[-1]}/{engine}")
            if layout.holds_target:
                raise InputError(
                    f"exports: the one for {engine} holds all weights of the target {name} beside the draft's; leave it out, "
                    "draftsmith export makes it where the target is"
                )
            (folder / engine).mkdir()
            left_out += [f"{engine}/{each}" for each in put_model(folder / engine, exported)]
    serve: dict[str, str] = {engine: (folder / engine / SERVE_FILE).read_text(encoding="utf-8") for engine in config.exports}
    complete(folder, release, cleaned, make_card(repo_id, cleaned, config, origins, serve, api.endpoint), config)
    return left_out


def _locate_target(name: str, revision: str | None, online: bool) -> Path:
    """Return the folder of the target, fetched where that is allowed."""
    if not online and not Path(name).exists() and HUB_ID.fullmatch(name):
        try:
            return fetch(name, revision, local_files_only=True)
        except LocalEntryNotFoundError as error:
            raise InputError(
                f"exports need the target {name}, which is not in the Hub's cache, and --dry-run fetches nothing: fetch it "
                "first, or leave exports out"
            ) from error
    folder = locate(TargetConfig(name=name, revision=revision))
    if folder.is_file():
        raise InputError(f"--target: {folder} is a single file; exports need a folder with config and safetensors")
    return folder

"""The steps of `scripts/push.py`: judge what lies here, make what is published of it, write or push that."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from configs.runtime.command import DONE, GATE_FAILED, INCONCLUSIVE
from configs.runtime.errors import InputError, first_line
from configs.runtime.redaction import Scrubber
from configs.runtime.terminal import one_line, say
from configs.schema.commands.release import HUB_ID, PushConfig
from configs.schema.target import TargetConfig
from eval.release.verdict import as_table
from heads.formats.exporting.exporter import SERVE_FILE, export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.formats.exporting.table import TREES
from heads.frozen.identity import fetch, locate
from scripts.publish.card_metadata import agreed_licence, initial_model, read_card
from scripts.publish.model_card import make_card
from scripts.publish.publication import Publication, clean, gather, name_for_engines, public_name
from scripts.publish.release_checks import Release, read_release, refuse_links_out
from scripts.publish.upload import full_name, push

RECORD = "pushed.json"  # beside the report: which commit of which repository came from here
REFUSED = {"fail": GATE_FAILED, "inconclusive": INCONCLUSIVE}


def publish(config: PushConfig, args: argparse.Namespace) -> int:
    """Publish an artifact, or write what would be published; return the exit code.

    Args:
        config: what to publish, and what to let pass.
        args: of `scripts/push.py`.

    Raises:
        InputError: something is refused; see `scripts.publish.release_checks`, `scripts.publish.publication` and
            `scripts.publish.upload`.
    """
    try:
        validate_repo_id(args.repo_id)
    except HFValidationError as error:
        raise InputError(f"--repo-id {args.repo_id}: {first_line(error)}") from error
    report_path = Path(args.report)
    release = read_release(Path(args.artifact), report_path, config, gate=args.gate, baseline=args.baseline)
    outcome = release.verdict.outcome
    if outcome != "pass" and not config.allow_failed_gate:
        say(as_table(release.verdict))
        say(
            f"nothing was published: the gate says {outcome} (--set allow_failed_gate=true publishes it anyway)",
            sys.stderr,
        )
        return REFUSED[outcome]
    api = HfApi()
    online = args.dry_run is None
    repo_id = full_name(api, args.repo_id) if online else args.repo_id
    with tempfile.TemporaryDirectory() as scratch:
        publication = _make(release, config, api, repo_id, args.target, online, Path(scratch))
        if not online:
            publication.write(Path(args.dry_run))
            done = f"{args.dry_run}: {len(publication.files)} files, as they would be pushed to {repo_id}"
        else:
            pushed = push(api, repo_id, publication, config, report_path.with_name(RECORD))
            seen, new = "private" if pushed.private else "public", "" if pushed.new else ", which held all of it already"
            done = f"{pushed.url} ({seen}): commit {pushed.commit}{new}"
    if publication.left_out:
        say(one_line(f"not published: {', '.join(publication.left_out)}"))
    say(done)
    return DONE


def _make(
    release: Release, config: PushConfig, api: HfApi, repo_id: str, target: str | None, online: bool, scratch: Path
) -> Publication:
    """Make everything that is to be published; exports go into `scratch`, which must live until they are pushed."""
    known = release.metadata.target
    name, revision = (target, None) if target is not None else (str(known["name"]), known.get("revision"))
    scrubber = Scrubber([get_token()])
    cleaned = clean(release, config, scrubber)
    origins = {cleaned.metadata["target"]["name"]: read_card(name, revision, online=online)}
    if (initial := initial_model(release.metadata.training)) is not None:
        origins[public_name(initial, scrubber)] = read_card(initial, None, online=online)
    if config.license is None and agreed_licence(origins.values()) is None:
        say(one_line(f"license: other, as the cards of {', '.join(origins)} do not name one; --set license=... states it"))
    exports: dict[str, Path] = {}
    if config.exports:
        folder = _locate_target(name, revision, online)
        source = read_source(release.folder, TargetFolder(folder, name_for_engines(cleaned, config)))
        tree = release.report.decode.static_tree
        in_tree = source if tree is None else source.with_tree(tree)
        for engine in config.exports:
            exports[engine] = scratch / engine
            served_from = f"{repo_id.split('/')[-1]}/{engine}"
            takes_tree = source.metadata.kind in TREES.get(engine, ())
            layout = export(in_tree if takes_tree else source, engine, exports[engine], served_from=served_from)
            if layout.holds_target and not config.allow_target_files:
                raise InputError(
                    f"exports: the one for {engine} holds all weights of the target {name} beside the draft's, and "
                    "would publish them under the draft's card; leave it out (scripts/export.py makes it where the target is), "
                    "or, if the target's licence lets you, --set allow_target_files=true publishes both"
                )
            if layout.holds_target:
                refuse_links_out(folder)
    serve = {engine: (folder / SERVE_FILE).read_text(encoding="utf-8") for engine, folder in exports.items()}
    card = make_card(repo_id, cleaned, config, origins, serve, api.endpoint)
    return gather(release, cleaned, exports, card, config, scrubber)


def _locate_target(name: str, revision: str | None, online: bool) -> Path:
    """Return the folder of the target, fetched where that is allowed.

    Raises:
        InputError: it is not here, or a single file.
    """
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

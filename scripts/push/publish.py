"""Judge what lies here, make what is published of it, and push that by huggingface_hub, or write it for a dry run.

One commit holds everything, of a slow upload several do. The first names its parent, and the Hub refuses it if somebody else
came first. A push that breaks off is resumed by the same command: huggingface_hub sends no file that has arrived a second time,
and makes no commit in which nothing changes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import HfApi, ModelCardData, ModelInfo, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from configs.runtime.command import DONE, GATE_FAILED, INCONCLUSIVE
from configs.runtime.errors import InputError, first_line
from configs.runtime.files import new_folder
from configs.runtime.redaction import hide
from configs.runtime.terminal import one_line, say
from configs.schema.commands.release import HUB_ID, PushConfig
from configs.schema.target import TargetConfig
from eval.release import as_table
from heads.formats.exporting.exporter import SERVE_FILE, export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.frozen.identity import fetch, locate
from scripts.push.card import make_card, read_card
from scripts.push.checks import Release, read_release
from scripts.push.files import NAMELESS, complete, put_artifact, put_model

REFUSED = {"fail": GATE_FAILED, "inconclusive": INCONCLUSIVE}
OF_THE_HUB = {".gitattributes"}  # in every new repository
TITLE = "Publish a draft with its report"  # begins our commits', by which a later push knows that it may follow them


def publish(config: PushConfig, args: argparse.Namespace) -> int:
    """Publish an artifact, or write what would be published, by the command's arguments; return the exit code."""
    try:
        validate_repo_id(args.repo_id)
    except HFValidationError as error:
        raise InputError(f"--repo-id {args.repo_id}: {first_line(error)}") from error
    release = read_release(Path(args.artifact), Path(args.report))
    outcome = release.verdict.outcome
    if outcome != "pass" and not config.allow_failed_gate:
        say(as_table(release.verdict))
        say(f"nothing was published: the gate says {outcome} (--set allow_failed_gate=true publishes it anyway)", sys.stderr)
        return REFUSED[outcome]
    api, repo_id = HfApi(), args.repo_id
    online = args.dry_run is None
    if not online and Path(args.dry_run).exists():
        raise InputError(f"{args.dry_run} exists already; give a new folder")
    if online:
        with _errors_in_words(api):
            user = api.whoami()["name"]
        repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"
    with tempfile.TemporaryDirectory() if online else new_folder(Path(args.dry_run)) as made:
        left_out = _fill(Path(made), release, config, repo_id, args.target, online)
        done = f"{args.dry_run}: the files, as they would be pushed to {repo_id}"
        if online:
            with _errors_in_words(api):
                done = _push(api, repo_id, Path(made), config)
    if left_out:
        say(one_line(f"not published: {', '.join(left_out)}"))
    say(done)
    return DONE


def _fill(folder: Path, release: Release, config: PushConfig, repo_id: str, target: str | None, online: bool) -> list[str]:
    """Put everything that is to be published into an empty folder; return the names of files that are left out."""
    known = release.metadata.target
    name, revision = (target, None) if target is not None else (str(known["name"]), known.get("revision"))
    if token := get_token():
        hide(token)
    cleaned, left_out = put_artifact(folder, release, config)
    origin = read_card(name, revision, online=online)
    student = release.metadata.training.get("student")
    if isinstance(student, Mapping) and student.get("init") == "model":  # a draft LM that began as another model
        origin = ModelCardData(language=origin.language)  # the licence of that one binds it too
    if config.license is None and origin.license is None:
        say(one_line(f"license: other, as no card of {cleaned.target} names the draft's; --set license=... states it"))
    serve = {}
    if config.exports:
        served = config.base_model or (cleaned.target if HUB_ID.fullmatch(cleaned.target) else NAMELESS)
        source = read_source(release.folder, TargetFolder(_locate_target(name, revision, online), served))
    for engine in config.exports:
        with tempfile.TemporaryDirectory() as scratch:
            exported = Path(scratch) / engine
            layout = export(source, engine, exported, served_from=f"{repo_id.split('/')[-1]}/{engine}")
            if layout.copy_target is not None:
                raise InputError(
                    f"exports: the one for {engine} holds all weights of the target {name} beside the draft's; leave it out, "
                    "draftsmith export makes it where the target is"
                )
            (folder / engine).mkdir()
            left_out += [f"{engine}/{each}" for each in put_model(folder / engine, exported)]
            serve[str(engine)] = (folder / engine / SERVE_FILE).read_text(encoding="utf-8")
    complete(folder, release, cleaned, make_card(repo_id, cleaned, config, origin, serve))
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


def _push(api: HfApi, repo_id: str, folder: Path, config: PushConfig) -> str:
    """Push a folder into a repository, which is made where it is missing; return where it lies now, in words."""
    api.create_repo(repo_id, private=config.private, exist_ok=True)
    info = api.model_info(repo_id)
    _check_writable(api, repo_id, info, config)
    commit = api.upload_folder(  # all that is there is of a push before
        repo_id=repo_id, folder_path=folder, delete_patterns=["*"], commit_message=TITLE, parent_commit=info.sha
    )
    seen, old = "private" if info.private else "public", ", which held all of it already" if commit.oid == info.sha else ""
    return f"{api.endpoint}/{repo_id} ({seen}): commit {commit.oid}{old}"


def _check_writable(api: HfApi, repo_id: str, info: ModelInfo, config: PushConfig) -> None:
    """Refuse a public repository while `private` is set, and one whose newest commit is no push."""
    if config.private and not info.private:
        raise InputError(f"{repo_id} exists and is public, while private is true: make it private, or --set private=false")
    there = {each.rfilename for each in info.siblings or ()}
    if there <= OF_THE_HUB or api.list_repo_commits(repo_id)[0].title.startswith(TITLE):
        return
    raise InputError(
        f"{repo_id} exists with {len(there)} files, and its newest commit is no push of this command: choose another --repo-id"
    )


@contextmanager
def _errors_in_words(api: HfApi) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence."""
    try:
        yield
    except InputError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        said = error if isinstance(error, HfHubHTTPError) else None
        if isinstance(error, LocalTokenNotFoundError) or (said is not None and said.response.status_code == 401):
            raise InputError(
                f"nobody is logged in to {api.endpoint}, or the token is no longer good: run `hf auth login`, or put a token "
                "that may write into HF_TOKEN"
            ) from error
        reason = (said.server_message if said is not None else None) or first_line(error)
        raise InputError(
            f"the push to {api.endpoint} broke off: {reason}; run the same command again to resume: what has arrived is not "
            "sent a second time"
        ) from error

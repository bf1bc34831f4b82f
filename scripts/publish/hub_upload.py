"""A publication onto the Hub: look who is there, send the large files, then make one commit of everything.

Until that commit the repository is as it was; it names the commit that it follows, and the Hub refuses it where somebody else
came between. Large files that have arrived are not sent again, by this push or a later one: the Hub knows them by their hash.
What is left of a push that broke off is an empty repository, if it was to be a new one, and files that no commit shows.

The protocol is huggingface_hub's (`HfApi.create_commit`), and so are the retries of a single request; here are the checks
before, another try of the whole, and what an error means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import sha

from configs.runtime.errors import InputError
from configs.runtime.files import read_json, sha256_of, write_json
from configs.schema.release import PushConfig
from heads.artifact import METADATA_FILE
from scripts.publish.hub_errors import BREAKS, errors_in_words, may_pass, moved, patiently, unknown
from scripts.publish.publication import MANIFEST, Content, Publication

OF_THE_HUB = {".gitattributes"}  # which a new repository holds from the beginning


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A repository as it stands.

    Args:
        head: its newest commit.
        private: who may see it.
        files: by path, the SHA-256 of a large file or the git hash of a small one.
    """

    head: str
    private: bool
    files: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What came of a push.

    Args:
        url: of the repository.
        commit: its newest, which holds the publication.
        new: a commit was made; False where everything was there already.
        private: who may see it.
    """

    url: str
    commit: str
    new: bool
    private: bool


def push(api: HfApi, repo_id: str, publication: Publication, config: PushConfig, record: Path) -> Pushed:
    """Push a publication.

    Args:
        api: who is logged in where.
        repo_id: `owner/name`.
        publication: all files.
        config: whether a new repository is private, what may be replaced, how often to try.
        record: a file that remembers what was pushed from here, made if missing.

    Raises:
        InputError: nobody is logged in or may write; the repository holds something else; the network or the Hub broke off.
    """
    known = _known_commit(record, api, repo_id)
    with errors_in_words(api, repo_id):
        opened = patiently(lambda: _open(api, repo_id, publication, config, known), config.attempts)
        pushed = _commit(api, repo_id, publication, opened, config.attempts)
    _remember(record, api, repo_id, pushed.commit)
    return pushed


def full_name(api: HfApi, repo_id: str, attempts: int) -> str:
    """Return `owner/name`, with who is logged in as the owner where none is given.

    Raises:
        InputError: nobody is logged in.
    """
    with errors_in_words(api, repo_id):
        user = patiently(api.whoami, attempts)["name"]
    return repo_id if "/" in repo_id else f"{user}/{repo_id}"


# --- before -------------------------------------------------------------------------------------------------------


def _open(api: HfApi, repo_id: str, publication: Publication, config: PushConfig, known: str | None) -> Remote:
    """Return the repository, made if it is not there; refuse one that is not to be written."""
    remote = _look(api, repo_id)
    if remote is None:
        return _create(api, repo_id, config)
    _check_visibility(repo_id, remote, config)
    _check_is_ours(api, repo_id, remote, publication, config, known)
    return remote


def _create(api: HfApi, repo_id: str, config: PushConfig) -> Remote:
    try:
        api.create_repo(repo_id, private=config.private, exist_ok=False)
    except HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise
        raise InputError(
            f"{repo_id} was made by somebody else in this moment; look at it, and run the command again"
        ) from error
    remote = _look(api, repo_id)
    if remote is None:
        raise RuntimeError(f"{api.endpoint} made {repo_id} and does not know it")
    _check_visibility(repo_id, remote, config)
    return remote


def _check_visibility(repo_id: str, remote: Remote, config: PushConfig) -> None:
    if config.private and not remote.private:
        raise InputError(
            f"{repo_id} exists and is public, while private is true: make it private on the Hub, or push to a public "
            "repository with --set private=false"
        )


def _look(api: HfApi, repo_id: str) -> Remote | None:
    try:
        info = api.model_info(repo_id)
    except RepositoryNotFoundError:
        return None
    files = {
        entry.path: entry.lfs.sha256 if entry.lfs is not None else entry.blob_id
        for entry in api.list_repo_tree(repo_id, recursive=True, revision=info.sha)
        if isinstance(entry, RepoFile)
    }
    return Remote(head=str(info.sha), private=bool(info.private), files=files)


def _check_is_ours(
    api: HfApi, repo_id: str, remote: Remote, publication: Publication, config: PushConfig, known: str | None
) -> None:
    """Refuse a repository with anything in it but what was pushed from here for the same target.

    Raises:
        InputError: what else it holds, and the setting that lets it be replaced.
    """
    if remote.files.keys() <= OF_THE_HUB or _holds(remote, publication):
        return
    if config.replace_commit is not None:
        if config.replace_commit != remote.head:
            raise InputError(f"replace_commit {config.replace_commit}: {repo_id} stands at {remote.head} now; look at it again")
        return
    told = f"look at it, and replace it with --set replace_commit={remote.head}, or choose another --repo-id"
    if METADATA_FILE not in remote.files:
        raise InputError(
            f"{repo_id} exists and holds no draft of draftsmith's ({len(remote.files)} files, no {METADATA_FILE}): {told}"
        )
    target = _read(api, repo_id, METADATA_FILE, remote.head).get("target")
    if not isinstance(target, dict) or target.get("weights_sha256") != publication.target_sha256:
        name = target.get("name") if isinstance(target, dict) else None
        raise InputError(f"{repo_id} exists and holds a draft for another target ({name}): {told}")
    if known is None:
        raise InputError(f"{repo_id} exists and was not pushed from this report's folder: {told}")
    if known != remote.head:
        raise InputError(f"{repo_id} was changed since the push from here ({known[:12]}): {told}")


def _read(api: HfApi, repo_id: str, name: str, revision: str) -> dict[str, object]:
    content = read_json(Path(api.hf_hub_download(repo_id, name, revision=revision)), f"{name} of {repo_id}")
    return content if isinstance(content, dict) else {}


def _holds(remote: Remote, publication: Publication) -> bool:
    """Whether every file of the publication is there, as it is."""
    return all(_is(content, remote.files.get(name)) for name, content in publication.files.items())


def _is(content: Content, digest: str | None) -> bool:
    """Whether a file has the hash that the Hub tells: by SHA-256 of a large file, by git of a small one."""
    if digest is None:
        return False
    if len(digest) == 64:
        return digest == (sha256_of(content) if isinstance(content, Path) else sha.sha256(content).hexdigest())
    return digest == sha.git_hash(content.read_bytes() if isinstance(content, Path) else content)


# --- the push -----------------------------------------------------------------------------------------------------


def _commit(api: HfApi, repo_id: str, publication: Publication, opened: Remote, attempts: int) -> Pushed:
    """Make the one commit, in some attempts; after the last, which may have arrived all the same, look what is there.

    Raises:
        InputError: it is not known whether the commit was made.
    """
    try:
        return patiently(lambda: _commit_once(api, repo_id, publication, opened), attempts)
    except BREAKS as error:
        if not may_pass(error):
            raise
        try:
            remote = _look(api, repo_id)
        except BREAKS as again:
            raise InputError(unknown(api, repo_id, again)) from error
        if remote is None or remote.head == opened.head or not _holds(remote, publication):
            raise
    return Pushed(url=f"{api.endpoint}/{repo_id}", commit=remote.head, new=True, private=remote.private)


def _commit_once(api: HfApi, repo_id: str, publication: Publication, opened: Remote) -> Pushed:
    """Make the one commit, unless it is there: the answer to an earlier try may have been lost, or nothing has changed."""
    remote = _look(api, repo_id)
    if remote is None:
        raise InputError(f"{repo_id} was removed from {api.endpoint} while it was pushed to")
    url = f"{api.endpoint}/{repo_id}"
    stale = _stale(api, repo_id, remote, publication)
    if _holds(remote, publication) and not stale:
        return Pushed(url=url, commit=remote.head, new=remote.head != opened.head, private=remote.private)
    if remote.head != opened.head:
        raise InputError(moved(repo_id))
    info = api.create_commit(
        repo_id,
        [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=each) for name, each in publication.files.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in stale),
        ],
        commit_message="Publish a draft with its report",
        parent_commit=remote.head,
    )
    return Pushed(url=url, commit=str(info.oid), new=True, private=remote.private)


def _stale(api: HfApi, repo_id: str, remote: Remote, publication: Publication) -> list[str]:
    """Return what an earlier push put there by its own list and this one has not; files of other origin are let be."""
    if MANIFEST not in remote.files:
        return []
    listed = _read(api, repo_id, MANIFEST, remote.head).get("files")
    earlier = listed.keys() if isinstance(listed, dict) else set()
    return sorted((earlier & remote.files.keys()) - publication.files.keys())


# --- what was pushed from here ------------------------------------------------------------------------------------


def _known_commit(record: Path, api: HfApi, repo_id: str) -> str | None:
    known = read_json(record, "record of pushes") if record.is_file() else {}
    commit = known.get(f"{api.endpoint}/{repo_id}") if isinstance(known, dict) else None
    return commit if isinstance(commit, str) else None


def _remember(record: Path, api: HfApi, repo_id: str, commit: str) -> None:
    known = read_json(record, "record of pushes") if record.is_file() else {}
    write_json(record, {**(known if isinstance(known, dict) else {}), f"{api.endpoint}/{repo_id}": commit})

"""Push a publication onto the Hub: check what is there, send the large files, then make one commit of everything.

Until that commit the repository is unchanged. The commit names its parent, and the Hub refuses it if somebody else came first.
Requests, large files and the commit are huggingface_hub's. A push that breaks off is resumed by the same command: files that
have arrived are known by their hash and not sent again, and a commit whose answer was lost is found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path

from httpx2 import Client, HTTPError, Timeout
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, set_client_factory
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import sha
from huggingface_hub.utils._http import default_client_factory

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import read_json, sha256_of, write_json
from configs.schema.commands.release import PushConfig
from scripts.publish.publication import MANIFEST, Content, Publication

OF_THE_HUB = {".gitattributes"}  # in every new repository
CONNECT_SECONDS, SILENCE_SECONDS = 30.0, 300.0  # without which a request counts as lost; the library would wait for ever
AGAIN = "run the same command again to resume: what has arrived is not sent a second time"
# A broken connection, or an answer that is no JSON, as from a proxy; the library wraps some of them in a RuntimeError.
BREAKS = (HTTPError, OSError, RuntimeError, JSONDecodeError)


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A repository on the Hub.

    head: its newest commit.
    files: by path, the SHA-256 of a large file or the git hash of a small one.
    """

    head: str
    private: bool
    files: Mapping[str, str]

    def holds(self, publication: Publication) -> bool:
        """Whether every file of a publication is there, unchanged."""
        return all(_has_hash(content, self.files.get(name)) for name, content in publication.files.items())


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The result of a push: the commit that holds the publication, and whether this push made it."""

    url: str
    commit: str
    new: bool
    private: bool


def full_name(api: HfApi, repo_id: str) -> str:
    """Return `owner/name`; without an owner, the one who is logged in.

    Raises:
        InputError: nobody is logged in.
    """
    with _errors_in_words(api, repo_id):
        user = api.whoami()["name"]
    return repo_id if "/" in repo_id else f"{user}/{repo_id}"


def push(api: HfApi, repo_id: str, publication: Publication, config: PushConfig, record: Path) -> Pushed:
    """Push a publication.

    Args:
        api: the Hub, and who is logged in.
        repo_id: `owner/name`.
        publication: all files.
        config: whether a new repository is private, and what may be replaced.
        record: the file that lists what was pushed from here; made if missing.

    Raises:
        InputError: nobody is logged in or may write; the repository holds something else; the network or the Hub failed.
    """
    key = f"{api.endpoint}/{repo_id}"
    content = read_json(record, "record of pushes") if record.is_file() else {}
    known = content if isinstance(content, dict) else {}
    with _errors_in_words(api, repo_id):
        remote = _look(api, repo_id)
        if remote is None:
            api.create_repo(repo_id, private=config.private, exist_ok=False)
            remote = _look(api, repo_id)
        if remote is None:
            raise RuntimeError(f"{api.endpoint} does not know {repo_id}, which it has just made")
        _check_writable(repo_id, remote, publication, config, known.get(key))
        commit = _commit(api, repo_id, remote, publication)
    write_json(record, known | {key: commit})
    return Pushed(url=key, commit=commit, new=commit != remote.head, private=remote.private)


def _commit(api: HfApi, repo_id: str, remote: Remote, publication: Publication) -> str:
    """Commit what the repository does not hold yet; return the commit that holds all of it."""
    stale = _stale(api, repo_id, remote, publication)
    if remote.holds(publication) and not stale:
        return remote.head
    info = api.create_commit(
        repo_id,
        [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=each) for name, each in publication.files.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in stale),
        ],
        commit_message="Publish a draft with its report",
        parent_commit=remote.head,
    )
    return str(info.oid)


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


def _check_writable(repo_id: str, remote: Remote, publication: Publication, config: PushConfig, known: str | None) -> None:
    """Refuse a public repository while `private` is set, and one with anything but what was pushed from here.

    Raises:
        InputError: what is wrong, and the setting that lets it pass.
    """
    if config.private and not remote.private:
        raise InputError(
            f"{repo_id} exists and is public, while private is true: make it private on the Hub, or push to a public "
            "repository with --set private=false"
        )
    if remote.files.keys() <= OF_THE_HUB or known == remote.head or remote.holds(publication):
        return
    if config.replace_commit is None:
        why = (
            "was not pushed from this report's folder"
            if known is None
            else f"was changed since the push from here ({known[:12]})"
        )
        raise InputError(
            f"{repo_id} exists with {len(remote.files)} files, and {why}: look at it, and replace it with "
            f"--set replace_commit={remote.head}, or choose another --repo-id"
        )
    if config.replace_commit != remote.head:
        raise InputError(f"replace_commit {config.replace_commit}: {repo_id} stands at {remote.head} now; look at it again")


def _stale(api: HfApi, repo_id: str, remote: Remote, publication: Publication) -> list[str]:
    """Return the files that an earlier push listed in its manifest and this one has not; files of other origin stay."""
    if MANIFEST not in remote.files:
        return []
    path = api.hf_hub_download(repo_id, MANIFEST, revision=remote.head)
    content = read_json(Path(path), f"{MANIFEST} of {repo_id}")
    listed = content.get("files") if isinstance(content, dict) else None
    earlier = listed.keys() if isinstance(listed, dict) else set()
    return sorted((earlier & remote.files.keys()) - publication.files.keys())


def _has_hash(content: Content, digest: str | None) -> bool:
    """Whether content has the hash that the Hub names: SHA-256 of a large file, git's of a small one."""
    if digest is None:
        return False
    if len(digest) == 64:
        return digest == (sha256_of(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest())
    return digest == sha.git_hash(content.read_bytes() if isinstance(content, Path) else content)


@contextmanager
def _errors_in_words(api: HfApi, repo_id: str) -> Iterator[None]:
    """Give requests a timeout, and turn what huggingface_hub raises into one sentence without a token.

    Raises:
        InputError: in place of any error of the library's, the Hub's or the network's.
    """

    def with_timeout() -> Client:
        client = default_client_factory()
        client.timeout = Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        return client

    set_client_factory(with_timeout)
    try:
        yield
    except InputError:
        raise
    except (*BREAKS, ValueError) as error:
        raise InputError(_in_words(api, repo_id, error)) from error
    finally:
        set_client_factory(default_client_factory)


def _in_words(api: HfApi, repo_id: str, error: Exception) -> str:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return (
            f"nobody is logged in to {api.endpoint}, or the token is no longer good: run `hf auth login`, or put a token that "
            "may write into HF_TOKEN"
        )
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so nothing can be pushed: unset it, or use --dry-run DIR"
    if status == 403:
        return f"the token in use may not write {repo_id} on {api.endpoint}: take one that may write its owner's repositories"
    if status in (409, 412):
        return f"{repo_id} was made or changed by somebody else during the push; look at it, and run the command again"
    if isinstance(error, HfHubHTTPError):
        reason = error.server_message or error.response.reason_phrase or "without a reason"
        return f"{api.endpoint} answered {status} ({reason}): {AGAIN}"
    if isinstance(error, BREAKS):
        return f"the connection to {api.endpoint} broke off: {_root(error)}; {AGAIN}"
    reason = " ".join(str(error).split())  # a ValueError: the Hub's check of the card
    return f"{api.endpoint} refused what was to be published: {reason}; nothing was published"


def _root(error: BaseException) -> str:
    """Return the first cause: the library wraps a dropped connection in a sentence on the file."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"

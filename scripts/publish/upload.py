"""Push a publication onto the Hub: check who writes where, send the large files, then make one commit of everything.

Until that commit the repository is unchanged. The commit names its parent, and the Hub refuses it if somebody else came first.
Requests, large files and the commit are huggingface_hub's; files that have arrived are known by their hash and not sent again.
An attempt is idempotent, so a push that breaks off is tried again from the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import TypeVar

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
from configs.runtime.terminal import say
from configs.schema.commands.release import PushConfig
from heads.artifact import METADATA_FILE
from scripts.publish.publication import MANIFEST, Content, Publication

OF_THE_HUB = {".gitattributes"}  # in every new repository
FIRST_WAIT_SECONDS = 2.0  # between two attempts; doubled each time
CONNECT_SECONDS, SILENCE_SECONDS = 30.0, 300.0  # without which a request counts as lost; the library would wait for ever
AGAIN = "run the same command again: what has arrived is not sent a second time"
# A broken connection, or an answer that is no JSON, as from a proxy; the library wraps some of them in a RuntimeError.
BREAKS = (HTTPError, OSError, RuntimeError, JSONDecodeError)

T = TypeVar("T")


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


def full_name(api: HfApi, repo_id: str, attempts: int) -> str:
    """Return `owner/name`; without an owner, the one who is logged in.

    Raises:
        InputError: nobody is logged in.
    """
    with _errors_in_words(api, repo_id):
        user = _try_again(api.whoami, attempts)["name"]
    return repo_id if "/" in repo_id else f"{user}/{repo_id}"


def push(api: HfApi, repo_id: str, publication: Publication, config: PushConfig, record: Path) -> Pushed:
    """Push a publication.

    Args:
        api: the Hub, and who is logged in.
        repo_id: `owner/name`.
        publication: all files.
        config: whether a new repository is private, what may be replaced, the number of attempts.
        record: the file that lists what was pushed from here; made if missing.

    Raises:
        InputError: nobody is logged in or may write; the repository holds something else; the network or the Hub failed.
    """
    key = f"{api.endpoint}/{repo_id}"
    known = _read_record(record)
    heads: list[str] = []  # of the repository before each attempt
    with _errors_in_words(api, repo_id):
        try:
            pushed = _try_again(lambda: _attempt(api, repo_id, publication, config, known.get(key), heads), config.attempts)
        except BREAKS as error:
            if not heads or not _may_pass(error):
                raise
            pushed = _find_lost_commit(api, repo_id, publication, heads[0], error)
    write_json(record, known | {key: pushed.commit})
    return pushed


def _attempt(
    api: HfApi, repo_id: str, publication: Publication, config: PushConfig, known: str | None, heads: list[str]
) -> Pushed:
    """Check the repository, made if it is not there, and commit what it does not hold yet."""
    remote = _look(api, repo_id)
    if remote is None:
        if heads:
            raise InputError(f"{repo_id} was removed from {api.endpoint} while it was pushed to")
        api.create_repo(repo_id, private=config.private, exist_ok=False)
        remote = _look(api, repo_id)
        if remote is None:
            raise RuntimeError(f"{api.endpoint} made {repo_id} and does not know it")
    heads.append(remote.head)
    _check_writable(api, repo_id, remote, publication, config, known)
    stale = _stale(api, repo_id, remote, publication)
    if remote.holds(publication) and not stale:
        return _pushed(api, repo_id, remote.head, remote, new=remote.head != heads[0])
    info = api.create_commit(
        repo_id,
        [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=each) for name, each in publication.files.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in stale),
        ],
        commit_message="Publish a draft with its report",
        parent_commit=remote.head,
    )
    return _pushed(api, repo_id, str(info.oid), remote, new=True)


def _find_lost_commit(api: HfApi, repo_id: str, publication: Publication, head: str, error: Exception) -> Pushed:
    """Return what was pushed if the last attempt's commit arrived although its answer did not; else raise `error`."""
    try:
        remote = _look(api, repo_id)
    except BREAKS as again:
        raise InputError(
            f"{api.endpoint} or the way there broke off at the commit, and again when {repo_id} was to be looked at: "
            f"{_root(again)}; it is not known whether it was published, {AGAIN}"
        ) from error
    if remote is None or remote.head == head or not remote.holds(publication):
        raise error
    return _pushed(api, repo_id, remote.head, remote, new=True)


def _pushed(api: HfApi, repo_id: str, commit: str, remote: Remote, *, new: bool) -> Pushed:
    return Pushed(url=f"{api.endpoint}/{repo_id}", commit=commit, new=new, private=remote.private)


# --- the repository -----------------------------------------------------------------------------------------------


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


def _check_writable(
    api: HfApi, repo_id: str, remote: Remote, publication: Publication, config: PushConfig, known: str | None
) -> None:
    """Refuse a public repository while `private` is set, and one with anything but what was pushed from here.

    Raises:
        InputError: what is wrong, and the setting that lets it pass.
    """
    if config.private and not remote.private:
        raise InputError(
            f"{repo_id} exists and is public, while private is true: make it private on the Hub, or push to a public "
            "repository with --set private=false"
        )
    if remote.files.keys() <= OF_THE_HUB or remote.holds(publication):
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


def _stale(api: HfApi, repo_id: str, remote: Remote, publication: Publication) -> list[str]:
    """Return the files that an earlier push listed in its manifest and this one has not; files of other origin stay."""
    if MANIFEST not in remote.files:
        return []
    listed = _read(api, repo_id, MANIFEST, remote.head).get("files")
    earlier = listed.keys() if isinstance(listed, dict) else set()
    return sorted((earlier & remote.files.keys()) - publication.files.keys())


def _read(api: HfApi, repo_id: str, name: str, revision: str) -> dict[str, object]:
    content = read_json(Path(api.hf_hub_download(repo_id, name, revision=revision)), f"{name} of {repo_id}")
    return content if isinstance(content, dict) else {}


def _has_hash(content: Content, digest: str | None) -> bool:
    """Whether content has the hash that the Hub names: SHA-256 of a large file, git's of a small one."""
    if digest is None:
        return False
    if len(digest) == 64:
        return digest == (sha256_of(content) if isinstance(content, Path) else sha.sha256(content).hexdigest())
    return digest == sha.git_hash(content.read_bytes() if isinstance(content, Path) else content)


def _read_record(record: Path) -> dict[str, str]:
    known = read_json(record, "record of pushes") if record.is_file() else {}
    return {key: commit for key, commit in known.items() if isinstance(commit, str)} if isinstance(known, dict) else {}


# --- errors -------------------------------------------------------------------------------------------------------


def _try_again(step: Callable[[], T], attempts: int) -> T:
    """Return what a step returns, tried again after a broken connection or an answer of 500 and above."""
    wait = FIRST_WAIT_SECONDS
    for attempt in range(1, attempts):
        try:
            return step()
        except BREAKS as error:
            if not _may_pass(error):
                raise
            say(f"try {attempt} of {attempts} broke off ({_root(error)}); again in {wait:g} s")
        time.sleep(wait)
        wait *= 2
    return step()


def _may_pass(error: Exception) -> bool:
    """Whether the same step may succeed a little later: not where the Hub refused it."""
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    # PermissionError: of a local file, or xet storage's for a token without the right.
    return not isinstance(error, (PermissionError, LocalTokenNotFoundError, OfflineModeIsEnabled))


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
        return f"{repo_id} was made or changed by somebody else while it was pushed to; look at it, and run the command again"
    if isinstance(error, HfHubHTTPError):
        said = error.server_message or error.response.reason_phrase or "without a reason"
        return f"{api.endpoint} answered {status} ({said}); nothing was published, {AGAIN}"
    if isinstance(error, BREAKS):
        return f"{api.endpoint} or the way there broke off: {_root(error)}; nothing was published, {AGAIN}"
    said = " ".join(str(error).split())  # a ValueError: the Hub's check of the card
    return f"{api.endpoint} did not take what was to be published: {said}; nothing was published"


def _root(error: BaseException) -> str:
    """Return the first cause: the library wraps a dropped connection in a sentence on the file."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"

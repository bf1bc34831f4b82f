"""Push a publication's folder onto the Hub, by huggingface_hub: large files are sent first, then one commit holds everything.

The commit names its parent, and the Hub refuses it if somebody else came first. A push that breaks off is resumed by the same
command: huggingface_hub sends no file that has arrived a second time, and makes no commit in which nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import HfApi, ModelInfo
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import read_object
from configs.schema.commands.release import PushConfig
from scripts.push.files import MANIFEST

OF_THE_HUB = {".gitattributes"}  # in every new repository
TITLE = "Publish a draft with its report"  # of our commits, by which a later push knows that it may follow them
AGAIN = "run the same command again to resume: what has arrived is not sent a second time"


def full_name(api: HfApi, repo_id: str) -> str:
    """Return `owner/name`; without an owner, the one who is logged in; an InputError where nobody is."""
    with _errors_in_words(api):
        user = api.whoami()["name"]
    return repo_id if "/" in repo_id else f"{user}/{repo_id}"


def push(api: HfApi, repo_id: str, folder: Path, config: PushConfig) -> str:
    """Push a folder into a repository, which is made where it is missing; return where it lies now, in words."""
    with _errors_in_words(api):
        api.create_repo(repo_id, private=config.private, exist_ok=True)
        info = api.model_info(repo_id)
        there = {each.rfilename for each in info.siblings or ()}
        _check_writable(api, repo_id, info, there, config)
        stale: list[str] = []  # files that the push before listed; those of other origin stay
        if MANIFEST in there:
            path = Path(api.hf_hub_download(repo_id, MANIFEST, revision=info.sha))
            stale = list(read_object(path, f"{MANIFEST} of {repo_id}").get("files") or ())
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, delete_patterns=stale, commit_message=TITLE, parent_commit=info.sha
        )
    seen, old = "private" if info.private else "public", ", which held all of it already" if commit.oid == info.sha else ""
    return f"{api.endpoint}/{repo_id} ({seen}): commit {commit.oid}{old}"


def _check_writable(api: HfApi, repo_id: str, info: ModelInfo, there: set[str], config: PushConfig) -> None:
    """Refuse a public repository while `private` is set, and one whose newest commit is no push."""
    if config.private and not info.private:
        raise InputError(
            f"{repo_id} exists and is public, while private is true: make it private on the Hub, or push to a public "
            "repository with --set private=false"
        )
    if there <= OF_THE_HUB or config.replace_commit == info.sha or api.list_repo_commits(repo_id)[0].title == TITLE:
        return
    if config.replace_commit is not None:
        raise InputError(f"replace_commit {config.replace_commit}: {repo_id} stands at {info.sha} now; look at it again")
    raise InputError(
        f"{repo_id} exists with {len(there)} files, and its newest commit is no push of this command: look at it, and replace "
        f"it with --set replace_commit={info.sha}, or choose another --repo-id"
    )


@contextmanager
def _errors_in_words(api: HfApi) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence."""
    try:
        yield
    except InputError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if isinstance(error, LocalTokenNotFoundError) or status == 401:
            raise InputError(
                f"nobody is logged in to {api.endpoint}, or the token is no longer good: run `hf auth login`, or put a token "
                "that may write into HF_TOKEN"
            ) from error
        reason = (error.server_message if isinstance(error, HfHubHTTPError) else None) or first_line(error)
        raise InputError(f"the push to {api.endpoint} broke off: {reason}; {AGAIN}") from error

"""A Hub in memory, in place of the calls of huggingface_hub that are made: repositories with their commits, tokens, and faults.

Each call is bound to the real one's signature first, so that an argument which that does not take is an error here too.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import inspect
import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import httpx2
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, LocalTokenNotFoundError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

TOKEN, READER = "hf_" + "W" * 30, "hf_" + "R" * 30  # who may write, and who may only read


@dataclass
class Repository:
    """Commits from the first to the head: id, title, and files by path."""

    private: bool
    commits: list = field(default_factory=list)

    @property
    def head(self):
        return self.commits[-1].id

    @property
    def files(self):
        return self.commits[-1].files

    def commit(self, files, title="by hand"):
        oid = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits.append(SimpleNamespace(id=oid, title=title, files=files))


def failed(status, reason):
    response = httpx2.Response(status, request=httpx2.Request("GET", Hub.endpoint))
    return HfHubHTTPError(reason, response=response, server_message=reason)


def call(method):
    """A call that the network carries: it is listed, refused to strangers, and fails where a fault is planted."""
    real = getattr(huggingface_hub.HfApi, method.__name__)

    @functools.wraps(method)
    def carried(self, *arguments, **options):
        inspect.signature(real).bind(self, *arguments, **options)
        self.requests.append(method.__name__)
        token = os.environ.get("HF_TOKEN")
        if not token:
            raise LocalTokenNotFoundError("no token")
        if token not in (TOKEN, READER):
            raise failed(401, "Invalid username or password.")
        if token == READER and method.__name__ in ("create_repo", "upload_folder"):
            raise failed(403, "no right to write")
        before, after = self.faults.pop(method.__name__, (None, None))
        if before is not None:
            raise before
        answer = method(self, *arguments, **options)
        if after is not None:
            raise after
        return answer

    return carried


class Hub:
    """The Hub's state and its calls, those of `HfApi` among them."""

    endpoint = "https://hub.test"

    def __init__(self, cache):
        self.cache, self.repositories, self.requests, self.faults = cache, {}, [], {}

    def make(self, repo_id, files, private=True):
        repository = self.repositories[repo_id] = Repository(private=private)
        repository.commit({".gitattributes": b""})
        if files:
            repository.commit({**repository.files, **files})
        return repository

    def _at(self, repo_id, revision):
        validate_repo_id(repo_id)
        repository = self.repositories.get(repo_id)
        if repository is None:
            raise failed(404, "Repository not found")
        found = [each for each in repository.commits if revision in (None, "main", each.id)]
        if not found:
            raise failed(404, "no such revision")
        return found[-1]

    def _folder(self, repo_id, oid):
        return self.cache / repo_id / "snapshots" / oid

    @call
    def whoami(self):
        return {"name": "ann"}

    @call
    def create_repo(self, repo_id, *, private, exist_ok):
        return self.repositories.get(repo_id) or self.make(repo_id, {}, private)

    @call
    def model_info(self, repo_id):
        found = self._at(repo_id, None)
        siblings = [SimpleNamespace(rfilename=path) for path in found.files]
        return SimpleNamespace(sha=found.id, private=self.repositories[repo_id].private, siblings=siblings)

    @call
    def list_repo_commits(self, repo_id):
        return self.repositories[repo_id].commits[::-1]

    @call
    def upload_folder(self, *, repo_id, folder_path, delete_patterns, commit_message, parent_commit):
        repository = self.repositories[repo_id]
        if parent_commit != repository.head:
            raise failed(412, "The head has moved")
        sent = {path.relative_to(folder_path).as_posix(): path for path in folder_path.rglob("*") if path.is_file()}
        stale = {path for path in repository.files if any(fnmatch.fnmatch(path, each) for each in delete_patterns)}
        kept = repository.files.keys() - stale | {".gitattributes"}
        files = {path: repository.files[path] for path in kept} | {path: file.read_bytes() for path, file in sent.items()}
        if files != repository.files:
            repository.commit(files, commit_message)
        return SimpleNamespace(oid=repository.head)

    @call
    def hf_hub_download(self, repo_id, filename, *, revision=None):
        found = self._at(repo_id, revision)
        if filename not in found.files:
            raise failed(404, "Entry not found")
        return str(self._write(repo_id, found, [filename]) / filename)

    def download(self, repo_id, filename, *, revision=None, local_files_only=False):
        if not local_files_only:
            return self.hf_hub_download(repo_id, filename, revision=revision)
        path = self._folder(repo_id, str(revision)) / filename
        if not path.is_file():
            raise LocalEntryNotFoundError("not in the cache")
        return str(path)

    def snapshot_download(self, repo_id, *, revision=None, local_files_only=False, allow_patterns, ignore_patterns=None):
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        found = self._snapshot(repo_id, revision=revision)
        wanted = filter_repo_objects(found.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        return str(self._write(repo_id, found, wanted))

    def _snapshot(self, repo_id, revision):
        self.model_info(repo_id)
        return self._at(repo_id, revision)

    def _write(self, repo_id, found, names):
        folder = self._folder(repo_id, found.id)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(found.files[name])
        return folder

    def replace(self, monkeypatch):
        """Put these calls into the places of huggingface_hub's."""
        for place in ("heads.frozen.identity.snapshot_download", "heads.metadata.snapshot_download"):
            monkeypatch.setattr(place, self.snapshot_download)
        monkeypatch.setattr("scripts.push.card.hf_hub_download", self.download)
        monkeypatch.setattr("scripts.push.publish.HfApi", lambda: self)

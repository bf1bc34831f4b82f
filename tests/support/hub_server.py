"""A Hub of our own on this machine, for tests: as much of its protocol as huggingface_hub 2.4 needs to move models.

It keeps every commit, tells small files by git's hash and large ones by SHA-256, takes large ones only through LFS, refuses a
commit whose parent is not the head or whose large files it never got, and hides private repositories from strangers. `faults`
make it fail: by method and a part of the path, a list of what happens to the next requests that fit, one after another.
Left out: xet storage (tests set HF_HUB_DISABLE_XET), branches, pull requests, uploads in several parts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml
from huggingface_hub.utils.sha import git_hash

TOKEN, READER = "hf_" + "W" * 30, "hf_" + "R" * 30  # who may write, and who may only read
SMALL = 2048  # bytes; larger files, and all safetensors, go through LFS
LOST = "lost"  # the request is served, and the connection closed in place of an answer
PAGE = "page"  # 502 with a page of HTML, as from a proxy


@dataclass
class Repository:
    """Commits from the first to the head, each with its files by path, and their titles."""

    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)

    @property
    def head(self):
        return self.commits[-1][0]

    @property
    def files(self):
        return self.commits[-1][1]

    def commit(self, files, title="by hand"):
        self.titles.append(title)
        self.commits.append((hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest(), files))

    def at(self, revision):
        return next((files for oid, files in self.commits if oid == revision), self.files if revision == "main" else None)


def is_large(path, content):
    return path.endswith(".safetensors") or len(content) > SMALL


class Hub:
    """The state of the server: repositories, blobs, what was asked of it, and how it is to fail."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.sent = Counter()  # blob -> how often its whole content arrived
        self.requests: list[tuple[str, str]] = []
        self.cards: list[str] = []  # that were validated
        self.faults: list[list] = []  # [method, part of the path, [fault, ...]]

    def fail(self, method, part, *faults):
        self.faults.append([method, part, list(faults)])

    def next_fault(self, method, path):
        for wanted, part, faults in self.faults:
            if wanted == method and part in path and faults:
                return faults.pop(0)
        return None

    def make(self, repo_id, files, private=True):
        repository = self.repositories[repo_id] = Repository(private=private)
        repository.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        if files:
            repository.commit({**repository.files, **files})
        return repository


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        """Stay silent."""

    def handle_request(self):
        method = self.command
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((method, path))
        self.muted = False
        fault = self.hub.next_fault(method, path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.read_chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self.rfile.read(length)
        if fault == PAGE:
            return self.answer(502, b"<html>Bad gateway</html>", "text/html")
        if isinstance(fault, int):
            return self.refuse(fault, "planted")
        self.muted = fault == LOST
        for wanted, pattern, serve in ROUTES:
            if wanted == method and (found := pattern.fullmatch(path)):
                return serve(self, body, **found.groupdict())
        return self.refuse(404, f"no such address: {method} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def read_chunks(self):
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    # --- answers

    def answer(self, status, content=b"", kind="application/json", **headers):
        if self.muted:
            self.connection.close()
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def say(self, value, status=200):
        self.answer(status, json.dumps(value).encode())

    def refuse(self, status, reason, code=None):
        headers = {"X_Error_Message": reason} | ({"X_Error_Code": code} if code else {})
        self.answer(status, json.dumps({"error": reason}).encode(), **headers)

    # --- who asks

    def token(self):
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def knows(self):
        return self.token() in (TOKEN, READER)

    def repository(self, name):
        """Return a repository that may be seen, or answer that there is none."""
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self.knows()):
            self.refuse(404 if self.knows() else 401, "Repository not found", "RepoNotFound")
            return None
        return found

    def may_write(self):
        if self.token() == TOKEN:
            return True
        self.refuse(403 if self.knows() else 401, "no right to write" if self.knows() else "Invalid username or password.")
        return False

    # --- the protocol

    def whoami(self, body):
        if not self.knows():
            return self.refuse(401, "Invalid username or password.")
        return self.say({"type": "user", "name": "ann", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def validate(self, body):
        content = json.loads(body)["content"]
        self.hub.cards.append(content)
        try:
            data = yaml.safe_load(content.split("---")[1])
            wrong = [key for key in ("license", "tags") if key not in data]
        except (yaml.YAMLError, IndexError) as error:
            wrong = [str(error)]
        return self.say({"errors": [{"message": each} for each in wrong], "warnings": []}, 400 if wrong else 200)

    def create(self, body):
        if not self.may_write():
            return None
        asked = json.loads(body)
        name = f"{asked['organization'] or 'ann'}/{asked['name']}"
        if name in self.hub.repositories:
            url = f"http://{self.headers['Host']}/{name}"
            return self.say({"error": "You already created this model repo", "url": url}, 409)
        self.hub.make(name, {}, private=asked.get("visibility") == "private")
        return self.say({"url": f"http://{self.headers['Host']}/{name}", "name": name})

    def info(self, body, repo, revision="main"):
        if (repository := self.repository(repo)) is None:
            return None
        if repository.at(revision) is None:
            return self.refuse(404, "no such revision", "RevisionNotFound")
        sha = repository.head if revision == "main" else revision
        siblings = [{"rfilename": path} for path in repository.at(revision)]
        return self.say({"_id": "0", "id": repo, "private": repository.private, "sha": sha, "tags": [], "siblings": siblings})

    def tree(self, body, repo, revision):
        if (repository := self.repository(repo)) is None:
            return None
        return self.say([self.entry(path, content) for path, content in repository.at(revision).items()])

    def entry(self, path, content):
        entry = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
        if is_large(path, content):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def preupload(self, body, repo, revision):
        if not self.may_write() or (repository := self.repository(repo)) is None:
            return None
        answers = []
        for each in json.loads(body)["files"]:
            path, old = each["path"], repository.files.get(each["path"])
            large = is_large(path, b" " * each["size"])
            answer = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if old is not None:
                answer["oid"] = hashlib.sha256(old).hexdigest() if is_large(path, old) else git_hash(old)
            answers.append(answer)
        return self.say({"files": answers})

    def batch(self, body, repo):
        if not self.may_write():
            return None
        objects = []
        for each in json.loads(body)["objects"]:
            known = each["oid"] in self.hub.blobs
            upload = {"upload": {"href": f"http://{self.headers['Host']}/lfs/{each['oid']}"}}
            objects.append(each if known else {**each, "actions": upload})
        return self.say({"transfer": "basic", "objects": objects})

    def put(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            return self.refuse(400, "the content has another hash")
        self.hub.blobs[oid] = body
        self.hub.sent[oid] += 1
        return self.answer(200)

    def commit(self, body, repo, revision):
        if not self.may_write() or (repository := self.repository(repo)) is None:
            return None
        header, *operations = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit", repository.head) != repository.head:
            return self.refuse(412, "The head has moved")
        files = dict(repository.files)
        for each in operations:
            value = each["value"]
            if each["key"] == "deletedFile":
                del files[value["path"]]
            elif each["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif value["oid"] not in self.hub.blobs:
                return self.refuse(400, f"{value['path']} was never uploaded")
            else:
                files[value["path"]] = self.hub.blobs[value["oid"]]
        repository.commit(files, header["value"]["summary"])
        return self.say({"commitUrl": f"http://{self.headers['Host']}/{repo}", "commitOid": repository.head})

    def history(self, body, repo, revision):
        if (repository := self.repository(repo)) is None:
            return None
        rest = {"authors": [], "date": "2026-01-01T00:00:00.000Z", "message": ""}
        commits = zip(repository.commits, repository.titles, strict=True)
        return self.say([{"id": oid, "title": title, **rest} for (oid, _), title in reversed(list(commits))])

    def resolve(self, body, repo, revision, path):
        if (repository := self.repository(repo)) is None:
            return None
        files = repository.at(revision)
        if files is None or path not in files:
            return self.refuse(404, "Entry not found", "RevisionNotFound" if files is None else "EntryNotFound")
        content, sha = files[path], repository.head if revision == "main" else revision
        etag = hashlib.sha256(content).hexdigest() if is_large(path, content) else git_hash(content)
        return self.answer(200, content, "application/octet-stream", ETag=f'"{etag}"', X_Repo_Commit=sha)


REPO = r"(?P<repo>[^/]+/[^/]+)"
ROUTES = [
    (method, re.compile(pattern), serve)
    for method, pattern, serve in (
        ("GET", "/api/whoami-v2", Handler.whoami),
        ("POST", "/api/validate-yaml", Handler.validate),
        ("POST", "/api/repos/create", Handler.create),
        ("GET", f"/api/models/{REPO}", Handler.info),
        ("GET", f"/api/models/{REPO}/revision/(?P<revision>[^/]+)", Handler.info),
        ("GET", f"/api/models/{REPO}/tree/(?P<revision>[^/]+)", Handler.tree),
        ("GET", f"/api/models/{REPO}/commits/(?P<revision>[^/]+)", Handler.history),
        ("POST", f"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", Handler.preupload),
        ("POST", f"/api/models/{REPO}/commit/(?P<revision>[^/]+)", Handler.commit),
        ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Handler.batch),
        ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})", Handler.put),
        ("GET", f"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
        ("HEAD", f"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
    )
]


class Server(ThreadingHTTPServer):
    """Quiet where a client goes away in the middle."""

    daemon_threads = True

    def handle_error(self, request, client_address):
        """Say nothing."""


def start(hub):
    """Serve a hub on a free port; return the server, whose `shutdown` ends it, and its address."""
    server = Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}"

"""`draftsmith push` against a Hub in memory: what arrives, what is refused, and what is there after faults."""

from __future__ import annotations

import hashlib
import json

import pytest

from configs.runtime.command import BAD_INPUT, DONE
from tests.support.hub import READER, failed

NAME = "ann/draft"
FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "draftsmith.json",
    "generation_config.json",
    "model.safetensors",
    "publication.json",
    "report.html",
    "report.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def files_of(hub, name=NAME):
    return {path for path in hub.repositories[name].files if path != ".gitattributes"}


def test_a_release_arrives_whole_in_one_private_commit_and_a_second_push_changes_nothing(push, hub, release):
    code, out, err = push(repo_id="draft")  # whose owner is the own account
    assert code == DONE, err
    repository = hub.repositories[NAME]
    assert repository.private
    assert len(repository.commits) == 2  # the Hub's own, then everything at once
    assert files_of(hub) == FILES
    assert repository.files["model.safetensors"] == (release / "artifact" / "model.safetensors").read_bytes()
    assert f"{hub.endpoint}/{NAME} (private): commit {repository.head}\n" in out
    assert "not published: optimizer.pt" in out
    listed = json.loads(repository.files["publication.json"])["files"]
    assert listed == {
        path: hashlib.sha256(content).hexdigest()
        for path, content in repository.files.items()
        if path not in (".gitattributes", "publication.json")
    }
    code, out, _ = push()
    assert code == DONE
    assert "which held all of it already" in out
    assert len(repository.commits) == 2


def test_a_later_push_sends_what_changed_and_removes_what_it_no_longer_holds(push, hub, release):
    assert push("--set", "exports=[transformers]", "--target", str(release / "target"))[0] == DONE
    repository = hub.repositories[NAME]
    assert {path for path in files_of(hub) if path.startswith("transformers/")} >= {"transformers/serve.txt"}
    assert push("--set", "license=mit")[0] == DONE
    assert files_of(hub) == FILES
    assert len(repository.commits) == 3
    changed = {path for path in FILES if repository.commits[1].files[path] != repository.files[path]}
    assert changed == {"README.md", "publication.json"}


@pytest.mark.parametrize(
    ("token", "said"), [("", "run `hf auth login`"), ("hf_" + "X" * 30, "run `hf auth login`"), (READER, "no right to write")]
)
def test_no_token_or_one_that_may_not_write_is_refused(push, hub, monkeypatch, tmp_path, token, said):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    code, out, err = push()
    assert (code, err.count("\n")) == (BAD_INPUT, 1)
    assert said in err
    assert not token or token not in out + err
    assert not hub.repositories


# --- a repository that is there already ---------------------------------------------------------------------------


def test_other_content_is_refused_also_where_it_came_after_a_push(push, hub):
    hub.make("ann/essay", {"essay.txt": b"words"})
    code, _, err = push(repo_id="ann/essay")
    assert code == BAD_INPUT
    assert "--repo-id" in err
    assert push()[0] == DONE
    repository = hub.repositories[NAME]
    repository.commit({**repository.files, "README.md": b"# edited on the Hub\n"})
    assert push("--set", "license=mit")[0] == BAD_INPUT
    assert len(repository.commits) == 3


def test_a_head_that_moves_while_the_files_are_sent_is_not_overwritten(push, hub, monkeypatch):
    from scripts.push import publish as upload

    check = upload._check_writable

    def moved(api, repo_id, *arguments):
        check(api, repo_id, *arguments)
        repository = hub.repositories[repo_id]
        repository.commit({**repository.files, "hello.txt": b"me too"})

    monkeypatch.setattr(upload, "_check_writable", moved)
    code, _, err = push()
    assert code == BAD_INPUT
    assert "The head has moved" in err
    assert files_of(hub) == {"hello.txt"}


def test_a_public_repository_is_not_pushed_to_by_default(push, hub):
    hub.make(NAME, {}, private=False)
    code, _, err = push()
    assert code == BAD_INPUT
    assert "private=false" in err
    assert push("--set", "private=false")[0] == DONE


# --- a network or a Hub that fails --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "before", "after"),
    [
        ("whoami", failed(503, "planted"), None),
        ("create_repo", None, ConnectionError("lost")),
        ("upload_folder", failed(500, "planted"), None),
        ("upload_folder", None, ConnectionError("lost")),
    ],
)
def test_a_push_that_breaks_off_is_resumed_by_the_same_command(push, hub, call, before, after):
    hub.faults[call] = before, after
    code, _, err = push()
    assert (code, err.count("\n")) == (BAD_INPUT, 1)
    assert "run the same command again to resume" in err
    code, out, err = push()
    assert code == DONE, err
    assert len(hub.repositories[NAME].commits) == 2
    assert files_of(hub) == FILES
    assert ("which held all of it already" in out) == (call == "upload_folder" and after is not None)

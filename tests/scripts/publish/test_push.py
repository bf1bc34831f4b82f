"""`scripts/push.py` against a Hub of our own (`hub_server`, not the real one): what arrives, and what is there after faults."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from configs.runtime.command import BAD_INPUT, DONE, INTERRUPTED
from tests.support.hub_server import CUT, LOST, PAGE, READER, SILENT, TOKEN

# huggingface_hub 2.4 sends files by an argument that httpx2 no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ENTRY = Path(__file__).resolve().parents[3] / "scripts" / "push.py"
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


def test_a_release_arrives_whole_in_one_private_commit(push, hub, release):
    code, out, err = push()
    assert code == DONE, err
    repository = hub.repositories[NAME]
    assert repository.private
    assert len(repository.commits) == 2  # the Hub's own, then everything at once
    assert files_of(hub) == FILES
    assert repository.files["model.safetensors"] == (release / "artifact" / "model.safetensors").read_bytes()
    assert f"{hub.address}/{NAME} (private): commit {repository.head}" in out
    assert "not published: optimizer.pt" in out
    assert json.loads((release / "evaluation" / "pushed.json").read_text()) == {f"{hub.address}/{NAME}": repository.head}
    listed = json.loads(repository.files["publication.json"])["files"]
    assert listed == {
        path: hashlib.sha256(content).hexdigest()
        for path, content in repository.files.items()
        if path not in (".gitattributes", "publication.json")
    }


def test_the_card_is_validated_by_the_server_as_the_library_asks_it(push, hub):
    assert push()[0] == DONE
    content = hub.repositories[NAME].files["README.md"].decode()
    assert hub.cards == [content]
    ModelCard(content).validate()


def test_a_name_without_owner_is_the_own_account(push, hub):
    assert push(repo_id="draft")[0] == DONE
    assert files_of(hub) == FILES


def test_the_same_push_again_changes_nothing(push, hub):
    assert push()[0] == DONE
    sent = dict(hub.sent)
    code, out, _ = push()
    assert code == DONE
    assert "which held all of it already" in out
    assert len(hub.repositories[NAME].commits) == 2
    assert hub.sent == sent


def test_a_later_push_sends_what_changed_and_removes_what_it_no_longer_holds(push, hub, release):
    target = ["--target", str(release / "target")]
    assert push("--set", "exports=[transformers]", *target)[0] == DONE
    repository = hub.repositories[NAME]
    assert {path for path in files_of(hub) if path.startswith("transformers/")} >= {"transformers/serve.txt"}
    sent = dict(hub.sent)
    assert push("--set", "license=mit")[0] == DONE
    assert files_of(hub) == FILES
    assert len(repository.commits) == 3
    changed = {path for path in FILES if repository.commits[1][1][path] != repository.files[path]}
    assert changed == {"README.md", "publication.json"}
    assert {oid: hub.sent[oid] for oid in sent} == sent


def test_nobody_logged_in_is_told_how(push, hub, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    code, _, err = push()
    assert code == BAD_INPUT
    assert "run `hf auth login`" in err
    assert not hub.repositories


@pytest.mark.parametrize(("token", "said"), [("hf_" + "X" * 30, "run `hf auth login`"), (READER, "may not write ann/draft")])
def test_a_token_that_is_wrong_or_may_not_write_is_refused(push, hub, monkeypatch, token, said):
    monkeypatch.setenv("HF_TOKEN", token)
    code, out, err = push()
    assert code == BAD_INPUT
    assert said in err
    assert token not in out + err
    assert not hub.repositories


def test_a_repository_made_in_the_same_moment_is_not_written(push, hub):
    hub.fail("POST", "/repos/create", 409)
    code, _, err = push()
    assert code == BAD_INPUT
    assert "made or changed by somebody else during the push" in err


def test_offline_says_so(push, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = push()
    assert code == BAD_INPUT
    assert "HF_HUB_OFFLINE is set" in err


# --- a repository that is there already ---------------------------------------------------------------------------


def test_an_empty_repository_is_filled(push, hub):
    hub.make(NAME, {})
    assert push()[0] == DONE
    assert files_of(hub) == FILES


def test_other_content_is_refused_and_replaced_only_by_the_name_of_its_commit(push, hub):
    repository = hub.make(NAME, {"README.md": b"# my essay\n", "essay.txt": b"words"})
    code, _, err = push()
    assert code == BAD_INPUT
    assert "exists with 3 files, and was not pushed from this report's folder" in err
    assert f"--set replace_commit={repository.head}" in err
    assert push("--set", f"replace_commit={'0' * 40}")[0] == BAD_INPUT
    assert len(repository.commits) == 2
    assert push("--set", f"replace_commit={repository.head}")[0] == DONE
    assert repository.files["essay.txt"] == b"words"  # what no push of ours put there is let be


def test_a_draft_pushed_from_elsewhere_is_refused(push, hub, release):
    assert push()[0] == DONE
    (release / "evaluation" / "pushed.json").unlink()
    code, _, err = push("--set", "license=mit")
    assert code == BAD_INPUT
    assert "was not pushed from this report's folder" in err


def test_a_head_that_moved_since_is_refused(push, hub):
    assert push()[0] == DONE
    repository = hub.repositories[NAME]
    repository.commit({**repository.files, "README.md": b"# edited on the Hub\n"})
    code, _, err = push("--set", "license=mit")
    assert code == BAD_INPUT
    assert "was changed since the push from here" in err
    assert repository.files["README.md"] == b"# edited on the Hub\n"


def test_a_head_that_moves_while_the_files_are_sent_is_not_overwritten(push, hub, monkeypatch):
    from scripts.publish import upload

    stale = upload._stale

    def moved(api, repo_id, remote, publication):
        repository = hub.repositories[repo_id]
        repository.commit({**repository.files, "hello.txt": b"me too"})
        return stale(api, repo_id, remote, publication)

    monkeypatch.setattr(upload, "_stale", moved)
    code, _, err = push()
    assert code == BAD_INPUT
    assert "changed by somebody else during the push" in err
    assert files_of(hub) == {"hello.txt"}


def test_a_public_repository_is_not_pushed_to_by_default(push, hub):
    hub.make(NAME, {}, private=False)
    code, _, err = push()
    assert code == BAD_INPUT
    assert "exists and is public, while private is true" in err
    assert push("--set", "private=false")[0] == DONE


# --- a network or a Hub that fails --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "part", "fault", "said"),
    [
        ("GET", "/whoami-v2", 503, "answered 503"),
        ("POST", "/repos/create", LOST, "broke off"),
        ("POST", "/validate-yaml", PAGE, "JSONDecodeError"),
        ("POST", "/commit/", 500, "answered 500"),
        ("POST", "/commit/", LOST, "broke off"),
    ],
)
def test_a_push_that_breaks_off_is_resumed_by_the_same_command(push, hub, method, part, fault, said):
    hub.fail(method, part, fault)
    code, _, err = push()
    assert (code, err.count("\n")) == (BAD_INPUT, 1)
    assert said in err
    assert "run the same command again to resume" in err
    code, out, err = push()
    assert code == DONE, err
    assert len(hub.repositories[NAME].commits) == 2
    assert files_of(hub) == FILES
    assert ("which held all of it already" in out) == ((part, fault) == ("/commit/", LOST))


@pytest.mark.parametrize(("method", "part", "fault"), [("POST", "/objects/batch", LOST), ("PUT", "/lfs/", CUT)])
def test_a_large_file_whose_connection_breaks_once_is_sent_again(push, hub, method, part, fault):
    hub.fail(method, part, fault)
    code, _, err = push()
    assert code == DONE, err
    assert files_of(hub) == FILES


def test_silence_is_not_waited_out(push, hub, monkeypatch):
    monkeypatch.setattr("scripts.publish.upload.SILENCE_SECONDS", 0.5)
    hub.fail("POST", "/commit/", SILENT)
    code, _, err = push()
    assert code == BAD_INPUT
    assert "broke off: ReadTimeout" in err


def test_a_connection_that_stays_cut_leaves_nothing_and_a_second_run_sends_the_rest(push, hub, release):
    weights = hashlib.sha256((release / "artifact" / "model.safetensors").read_bytes()).hexdigest()
    hub.fail("PUT", weights, *[CUT] * 100)
    code, _, err = push()
    assert code == BAD_INPUT
    assert "broke off" in err
    assert files_of(hub) == set()
    arrived = set(hub.sent)
    assert arrived
    assert weights not in arrived
    hub.faults.clear()
    assert push()[0] == DONE
    assert files_of(hub) == FILES
    assert set(hub.sent) - arrived == {weights}
    assert all(count == 1 for count in hub.sent.values())


def test_death_before_the_commit_leaves_nothing_and_no_file_is_sent_again(push, hub, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub._commit_api._send_commit", lambda **settings: (_ for _ in ()).throw(KeyboardInterrupt))
        assert push()[0] == INTERRUPTED
    assert files_of(hub) == set()
    sent = dict(hub.sent)
    assert sent
    assert push()[0] == DONE
    assert files_of(hub) == FILES
    assert hub.sent == sent


def test_run_as_a_person_does(release, hub, tmp_path):
    report = release / "evaluation" / "report.json"
    command = [sys.executable, str(ENTRY), str(release / "artifact"), "--report", str(report), "--repo-id", NAME]
    environment = os.environ | {
        "HF_ENDPOINT": hub.address,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": TOKEN,
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == DONE, done.stderr
    assert files_of(hub) == FILES
    assert b"<svg" in hub.repositories[NAME].files["report.html"]
    assert TOKEN not in done.stdout + done.stderr

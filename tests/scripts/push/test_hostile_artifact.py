"""What an artifact from elsewhere cannot make `draftsmith push` do: publish other files, publish secrets, hang, crash."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from safetensors.torch import load_file, save_file

from configs.runtime.command import BAD_INPUT
from heads.metadata import hash_artifact, read_metadata
from tests.scripts.conftest import PLANTED, change, judge

PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmU\n-----END OPENSSH PRIVATE KEY-----\n"
DOCKER = json.dumps({"auths": {"registry.example": {"auth": "YWxpY2U6cGFzc3dvcmQ="}}})
KUBERNETES = ".dockerconfigjson: eyJhdXRocyI6eyJyZWdpc3RyeS5leGFtcGxlIjp7fX19"


def refused(outcome, *words):
    """Assert that a dry run ended with one sentence on a mistake, and wrote nothing."""
    code, _, err = outcome
    assert code == BAD_INPUT
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize("name", ["merges.txt", "config.json"])
def test_a_link_out_of_the_folder_is_refused(dry, release, tmp_path, name):
    (tmp_path / "id_rsa").write_text("of this machine")
    path = release / "artifact" / name
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "id_rsa")
    refused(dry(), f"{name} is a link to {tmp_path / 'id_rsa'}, outside the folder")


def test_a_link_within_the_folder_and_a_snapshot_of_the_hubs_cache_are_published(push, dry, release, tmp_path):
    artifact = release / "artifact"
    (artifact / "tokenizer.json").rename(artifact / "kept.json")
    (artifact / "tokenizer.json").symlink_to("kept.json")
    assert (dry() / "tokenizer.json").read_bytes() == (artifact / "kept.json").read_bytes()
    snapshot, blobs = tmp_path / "models--ann--draft" / "snapshots" / "abc", tmp_path / "models--ann--draft" / "blobs"
    shutil.copytree(artifact, snapshot)
    shutil.rmtree(artifact)
    artifact.symlink_to(snapshot)
    blobs.mkdir()
    (snapshot / "tokenizer.json").rename(blobs / "f00d")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/f00d")
    assert push("--dry-run", str(tmp_path / "again"))[0] == 0
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (blobs / "f00d").read_bytes()


@pytest.mark.parametrize(
    ("secret", "encoding"), [(PLANTED, "utf-8"), (PEM, "utf-16"), (DOCKER, "utf-8"), (KUBERNETES, "utf-8")]
)
def test_a_secret_in_a_file_that_is_sent_as_it_is_is_refused(dry, release, secret, encoding):
    before = "a b\n" * 2_000_000  # the secret is in the second piece that is read
    (release / "artifact" / "merges.txt").write_text(before + secret, encoding=encoding)
    outcome = dry()
    refused(outcome, "merges.txt holds what looks like an access token or a private key")
    assert secret not in outcome[2]


def test_a_secret_in_the_header_of_the_weights_is_refused(dry, release):
    artifact = release / "artifact"
    save_file(load_file(artifact / "model.safetensors"), artifact / "model.safetensors", metadata={"format": "pt", "note": PEM})
    sha256 = hash_artifact(artifact, read_metadata(artifact))
    change(release / "evaluation" / "report.json", lambda report: report["draft"].update(sha256=sha256))
    judge(release)
    refused(dry(), "model.safetensors holds what looks like")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["merges.txt", "model.safetensors"])
def test_what_is_no_file_is_refused_and_not_waited_for(dry, release, name):
    path = release / "artifact" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    refused(dry(), f"{name}: expected a file, got a pipe, a socket or a device")


@pytest.mark.parametrize("repo_id", ["a/../b", "a/b/c", "", "a/b\x1b[2J"])
def test_a_name_that_is_none_of_the_hubs_is_refused(dry, repo_id):
    refused(dry(repo_id=repo_id), "--repo-id")

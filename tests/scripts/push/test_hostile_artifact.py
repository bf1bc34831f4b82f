"""What an artifact from elsewhere cannot make `draftsmith push` do: publish other files, publish secrets, hang, crash."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from configs.runtime.command import BAD_INPUT, DONE
from configs.runtime.terminal import UNSEEN
from heads.metadata import hash_artifact, read_metadata
from tests.scripts.conftest import PLANTED, change, judge
from tests.support.markdown import shape_of, tokens_of

PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmU\n-----END OPENSSH PRIVATE KEY-----\n"
DOCKER = json.dumps({"auths": {"registry.example": {"auth": "YWxpY2U6cGFzc3dvcmQ="}}})
KUBERNETES = ".dockerconfigjson: eyJhdXRocyI6eyJyZWdpc3RyeS5leGFtcGxlIjp7fX19"
HOSTILE = "x\n---\n# Licence: MIT\n```\n</details><script>y</script> \\\\[z](http://host) \x1b]0;title\x07 \u202e |`"


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


# --- the card -----------------------------------------------------------------------------------------------------


def write_everywhere(release, text):
    """Write a text into whatever of an artifact and its report takes one, and let the gate judge them."""

    def alter_metadata(metadata):
        metadata["target"] |= {"name": f"embedded:{text}", "revision": text}
        metadata["training"] = {
            "data": {"train": text},
            "loss": {"divergence": text},
            text: text,
            "student": {"init": "model", "path": text},
        }
        metadata["provenance"] = {"command": [text], "imported_from": text, "versions": {text: text}, "git": {"commit": text}}

    def alter_report(report):
        report["draft"] |= {"sha256": sha256, "path": text}
        report["target"]["name"] = text
        report["prompts"]["source"] = text
        report["warnings"] = [text]
        report["hardware"]["cpu"] = text
        report["by_category"] = {text: next(iter(report["by_category"].values()))}

    artifact = release / "artifact"
    change(artifact / "draftsmith.json", alter_metadata)
    sha256 = hash_artifact(artifact, read_metadata(artifact))
    change(release / "evaluation" / "report.json", alter_report)
    judge(release)


def test_no_text_of_an_artifact_or_a_report_changes_the_form_of_the_card(push, release, tmp_path, no_network):
    cards = []
    for number, text in enumerate(("plain words", HOSTILE)):
        write_everywhere(release, text)
        code, out, err = push("--dry-run", str(tmp_path / str(number)))
        assert code == DONE, err
        assert not UNSEEN.search(out + err)
        content = (tmp_path / str(number) / "README.md").read_text()
        assert not UNSEEN.search(content)
        cards.append(ModelCard(content))
    plain, hostile = cards
    assert shape_of(hostile.text) == shape_of(plain.text)
    assert tokens_of(hostile.text).isdisjoint({"link_open", "image", "html_inline"})
    assert hostile.data.to_dict().keys() == plain.data.to_dict().keys()
    assert (hostile.data.license, hostile.data.base_model) == (plain.data.license, plain.data.base_model)

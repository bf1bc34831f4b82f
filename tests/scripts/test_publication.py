"""What `draftsmith push` publishes, seen in a dry run: the card, what it is made from, what stays at home, what is refused."""

from __future__ import annotations

import json
import re
import socket

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from configs.runtime.command import BAD_INPUT, DONE, GATE_FAILED, INCONCLUSIVE
from configs.schema.heads import MedusaSettings, MtpSettings
from eval.release import read_artifact
from eval.report.schema import load_report
from heads.families.registry import FAMILIES
from heads.frozen.identity import hash_weights
from heads.metadata import PROMPTS_FILE, WEIGHTS_FILE, hash_artifact
from tests.scripts.conftest import PLANTED, change, judge
from tests.support.mtp_checkpoints import module_tensors
from tests.support.reports import numbers_of
from tests.support.tiny_heads import save_artifact

PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmU\n-----END OPENSSH PRIVATE KEY-----\n"
DOCKER = json.dumps({"auths": {"registry.example": {"auth": "YWxpY2U6cGFzc3dvcmQ="}}})
NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?![\w.])")


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Opening a connection fails."""

    def refuse(*arguments):
        raise AssertionError("a dry run touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def dry(push, tmp_path, no_network):
    """A function that makes a dry run; returns the folder, or code and complaint where there is none."""

    def run(*more, **options):
        code, out, err = push("--dry-run", str(tmp_path / "dry"), *more, **options)
        return tmp_path / "dry" if code == DONE else (code, out, err)

    return run


def card_of(folder):
    return ModelCard.load(folder / "README.md")


# --- the folder ---------------------------------------------------------------------------------------------------


def test_a_dry_run_writes_an_artifact_whose_report_and_hash_agree(dry, release):
    folder = dry()
    report = load_report(folder / "report.json")
    assert hash_artifact(folder) == report.draft.sha256
    measured = load_report(release / "evaluation" / "report.json")
    assert report.draft.measured_sha256 == measured.draft.sha256 != report.draft.sha256
    assert report.acceptance == measured.acceptance
    assert read_artifact([folder]).sha256 == report.draft.sha256
    assert (folder / "model.safetensors").read_bytes() == (release / "artifact" / "model.safetensors").read_bytes()
    assert json.loads((folder / "publication.json").read_text())["gate"]["outcome"] == "pass"


def rehash(release, alter=lambda metadata: None, **section):
    """Change a release's metadata, and its report and verdict with the artifact."""
    change(release / "artifact" / "draftsmith.json", alter)
    section |= {"sha256": hash_artifact(release / "artifact")}
    change(release / "evaluation" / "report.json", lambda report: report["draft"].update(section))
    judge(release)


def test_no_secret_and_no_path_of_the_machine_is_published(dry, release, tmp_path, monkeypatch):
    own = "hf_" + "Q" * 30
    monkeypatch.setenv("HF_TOKEN", own)
    change(
        release / "evaluation" / "report.json",
        lambda report: report["warnings"].append(f"/home/alice/x was made for another, see file:///home/alice/y {own}"),
    )
    paths = dict.fromkeys(("name_or_path", "vocab_file"), str(release / "target"))
    change(release / "artifact" / "tokenizer_config.json", lambda config: config.update(paths))
    save_file({"user_texts": torch.zeros(1, dtype=torch.int64)}, release / "artifact" / PROMPTS_FILE)
    rehash(release)
    folder = dry("--set", "exports=[transformers]", "--target", str(release / "target"))
    assert (folder / "transformers" / "serve.txt").is_file()
    assert list(folder.rglob(PROMPTS_FILE)) == []
    hidden = [PLANTED, own, "alice", "deals 2026", str(tmp_path), str(release), str(tmp_path.parent)]
    found = [
        (path.name, text)
        for path in folder.rglob("*")
        if path.is_file()
        for text in hidden
        if text.encode() in path.read_bytes()
    ]
    assert found == []
    assert not (folder / "optimizer.pt").exists()


# --- the card -----------------------------------------------------------------------------------------------------


def test_every_figure_in_the_card_is_in_the_report(dry):
    folder = dry()
    report, metadata = load_report(folder / "report.json"), json.loads((folder / "draftsmith.json").read_text())
    text = card_of(folder).text.replace(re.search(r"# Where it comes from.*?# Licence", card_of(folder).text, re.DOTALL)[0], "")
    allowed = {"95"}  # the intervals' level in per cent
    for source in (report.to_dict(), metadata):
        for _, value in numbers_of(source):
            if value is not None:
                scaled = (value, 100 * value, value / 1e6)
                allowed |= {f"{each:{form}}" for each in scaled for form in (".0f", ".1f", ".2f", ".3f", ".4g", "g")}
    allowed |= {str(position) for position in range(1, len(report.acceptance.position_survival) + 1)}
    figures = NUMBER.findall(text)
    assert len(figures) > 50
    assert [figure for figure in figures if figure not in allowed] == []


def test_the_card_names_the_target_and_the_kind_and_says_how_to_serve_it(dry, push, tmp_path):
    card = card_of(dry("--set", "exports=[transformers]"))
    assert push("--dry-run", str(tmp_path / "named"), "--set", "base_model=owner/target")[0] == DONE
    data = card_of(tmp_path / "named").data
    assert (data.base_model, data.base_model_relation, data.library_name) == ("owner/target", "finetune", "transformers")
    assert {"speculative-decoding", "draft_lm"} <= set(data.tags)
    assert "hf download ann/draft --include 'transformers/*' --local-dir draft" in card.text
    assert "AutoModelForCausalLM.from_pretrained('TARGET'" in card.text
    assert "draftsmith export ann/draft --to vllm" in card.text


def put_head(release, tiny_llama, settings, **provenance):
    """Put a head into the place of the release's draft LM."""
    artifact = release / "artifact"
    known = json.loads((artifact / "draftsmith.json").read_text())
    head = FAMILIES[settings.kind].build(settings, tiny_llama(seed=1, dtype=torch.float32), None)
    save_artifact(artifact, head, known["target"], num_speculative_tokens=2, provenance=provenance)
    rehash(release, kind=settings.kind)


def test_a_head_is_an_adapter_of_its_target_and_goes_into_its_engines(dry, release, tiny_llama):
    put_head(release, tiny_llama, MedusaSettings(kind="medusa", num_depths=2), imported_from="/home/alice/medusa")
    where = ["--target", str(release / "target"), "--set", "base_model=owner/target"]
    folder = dry("--set", "exports=[vllm]", *where)
    card = card_of(folder)
    assert (card.data.base_model, card.data.base_model_relation) == ("owner/target", "adapter")
    assert card.data.library_name is None
    assert "A head of kind `medusa`" in card.text
    assert "| imported from | medusa |" in card.text
    assert "vllm serve owner/target --speculative-config" in card.text
    assert '"model": "draft/vllm"' in card.text
    assert {path.name for path in (folder / "vllm").iterdir()} == {"config.json", "model.safetensors", "serve.txt"}


def test_an_export_that_holds_the_target_is_not_published(dry, release, tiny_llama, tmp_path):
    folder, model = release / "target", tiny_llama(seed=1, dtype=torch.float32)
    weights = load_file(folder / WEIGHTS_FILE) | module_tensors("qwen3_next", model)[0]
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    known = {"weights_sha256": hash_weights(folder)}
    change(release / "artifact" / "draftsmith.json", lambda metadata: metadata["target"].update(known))
    put_head(release, tiny_llama, MtpSettings(kind="mtp", num_depths=2))
    code, _, err = dry("--set", "exports=[vllm]", "allow_failed_gate=true", "--target", str(folder))
    assert code == BAD_INPUT
    assert "exports: the one for vllm holds all weights of the target" in err
    assert not (tmp_path / "dry").exists()


def test_the_licence_is_what_the_targets_card_says_and_never_invented(dry, push, release, tmp_path):
    card = release / "target" / "README.md"
    card.write_text(
        "---\nlicense: other\nlicense_name: gemma\nlicense_link: https://ai.google.dev/terms\nlanguage: [de, null, no]\n---\n"
    )
    rehash(release, lambda value: value["target"].update(name=str(release / "target")))
    data = card_of(dry()).data
    assert (data.license, data.license_name, data.language) == ("other", "gemma", ["de"])
    began = {"student": {"init": "model", "path": "elsewhere"}}  # another model's licence binds it too
    rehash(release, lambda value: value.update(training=began))
    code, out, _ = push("--dry-run", str(tmp_path / "none"))
    assert code == DONE
    assert "--set license=... states it" in out
    assert card_of(tmp_path / "none").data.license == "other"
    assert "Not stated" in card_of(tmp_path / "none").text
    assert push("--dry-run", str(tmp_path / "told"), "--set", "license=apache-2.0")[0] == DONE
    assert card_of(tmp_path / "told").data.license == "apache-2.0"


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_report_of_another_draft_is_refused(dry, release):
    change(release / "evaluation" / "report.json", lambda report: report["draft"].update(sha256="0" * 64))
    code, _, err = dry("--set", "allow_failed_gate=true")
    assert code == BAD_INPUT
    assert "report.json is not of" in err


@pytest.mark.parametrize(
    ("limit", "expected", "said"),
    [(2.99, GATE_FAILED, "**Its release gate failed"), (None, INCONCLUSIVE, "gate was inconclusive")],
)
def test_a_gate_that_did_not_pass_is_passed_by_only_by_name(dry, release, tmp_path, limit, expected, said):
    tau = load_report(release / "evaluation" / "report.json").acceptance.tokens_per_target_step
    judge(release, rules=[{"metric": "acceptance.tokens_per_target_step", "min": limit or tau}])
    code, out, err = dry()
    assert code == expected
    assert "acceptance.tokens_per_target_step" in out
    assert "--set allow_failed_gate=true" in err
    assert not (tmp_path / "dry").exists()
    assert said in card_of(dry("--set", "allow_failed_gate=true")).text


def test_a_stored_pass_of_a_gate_that_asked_for_neither_tau_nor_speed_is_none(dry, release):
    change(release / "evaluation" / "gate.json", lambda record: record["config"].update(rules=[]))
    assert dry()[0] == INCONCLUSIVE
    assert "release gate passed" not in card_of(dry("--set", "allow_failed_gate=true")).text


def test_without_a_verdict_or_with_another_reports_nothing_is_published(dry, release):
    change(release / "evaluation" / "report.json", lambda report: report["warnings"].append("changed since"))
    code, _, err = dry()
    assert code == BAD_INPUT
    assert "gate.json judged another report" in err
    (release / "evaluation" / "gate.json").unlink()
    code, _, err = dry()
    assert code == BAD_INPUT
    assert "no gate has judged" in err


# --- an artifact from elsewhere -------------------------------------------------------------------------------------


def refused(outcome, *words):
    """Assert that a dry run ended with one sentence on a mistake, and wrote nothing."""
    code, _, err = outcome
    assert code == BAD_INPUT
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize(("secret", "encoding"), [(PEM, "utf-16"), (DOCKER, "utf-8")])
def test_a_secret_in_a_file_that_is_sent_as_it_is_is_refused(dry, release, secret, encoding):
    before = "a b\n" * 2_000_000  # the secret is in the second piece that is read
    (release / "artifact" / "merges.txt").write_text(before + secret, encoding=encoding)
    rehash(release)
    outcome = dry()
    refused(outcome, "merges.txt holds what looks like an access token or a private key")
    assert secret not in outcome[2]


@pytest.mark.parametrize("repo_id", ["a/../b", "a/b/c", "", "a/b\x1b[2J"])
def test_a_name_that_is_none_of_the_hubs_is_refused(dry, repo_id):
    refused(dry(repo_id=repo_id), "--repo-id")

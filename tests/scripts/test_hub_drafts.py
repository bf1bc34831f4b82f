"""A draft by its name on the Hub, wherever a folder would do: loading, evaluating, the gate, export, import. Against a
Hub in memory."""

from __future__ import annotations

import importlib
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.runtime.command import DONE, run_command
from configs.runtime.errors import InputError
from configs.runtime.files import TORCH_FILE
from configs.schema.commands.release import ExportConfig
from configs.schema.evaluation import EvalConfig, GateConfig
from configs.schema.target import TargetConfig
from eval import gate
from eval.measure.interleaved import load_evaluated
from heads.artifact import load_draft
from heads.frozen.identity import locate
from heads.frozen.loading import load_target
from heads.frozen.weights import read_weights
from heads.metadata import locate_artifact, locate_external, read_metadata
from scripts.push.card import read_card
from tests.support.hub import READER

exporting = importlib.import_module("scripts.export")
NAME = "ann/draft"


@pytest.fixture
def target(release):
    return load_target(TargetConfig(name=str(release / "target"), dtype="float32", device="cpu"))


def run(schema, module, *argv):
    return run_command(schema, module.main, description="", argv=list(argv), add_arguments=module.add_arguments)


def upload(hub, name, folder, **more):
    """Put the files of a folder into a repository."""
    return hub.make(name, {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} | more)


@pytest.mark.parametrize("size", ["1TB", "20KB"], ids=["whole", "sharded"])
def test_a_second_copy_of_a_targets_weights_is_not_fetched(hub, target, tmp_path, size):
    target.model.save_pretrained(tmp_path / "target", max_shard_size=size)
    weights = {path.name for path in (tmp_path / "target").glob("*.safetensors")}
    assert (len(weights) > 1) == (size != "1TB")
    upload(hub, NAME, tmp_path / "target", **{"consolidated.safetensors": b"its own names", "params.json": b"{}"})
    folder = locate(TargetConfig(name=NAME))
    assert {path.name for path in folder.glob("*.safetensors")} == weights


def test_code_of_a_target_is_fetched_where_it_is_trusted(hub, target, tmp_path):
    target.model.save_pretrained(tmp_path / "target")
    upload(hub, NAME, tmp_path / "target", **{"modeling_own.py": b"", "qwen.tiktoken": b"IQ== 0"})
    for trusted in (False, True):
        folder = locate(TargetConfig(name=NAME, trust_remote_code=trusted))
        assert (folder / "modeling_own.py").exists() == trusted
        assert (folder / "qwen.tiktoken").exists()


def test_what_was_pushed_is_loaded_gated_evaluated_and_exported_by_its_name(push, hub, release, target, tmp_path):
    assert push()[0] == DONE
    report = tmp_path / "report.json"
    report.write_bytes(hub.repositories[NAME].files["report.json"])
    published = json.loads(report.read_text())["draft"]
    ours, there = (load_draft(name, target.identity, target.model) for name in (release / "artifact", NAME))
    assert (there.sha256, ours.sha256) == (published["sha256"], published["measured_sha256"])
    ours, there = ours.proposer.model.state_dict(), there.proposer.model.state_dict()
    assert ours.keys() == there.keys()
    assert all(torch.equal(ours[name], there[name]) for name in ours)
    rules = ("rules=[{metric: acceptance.tokens_per_target_step, min: 0.5}]", "allow_unknown_training=true")
    assert run(GateConfig, gate, str(report), "--artifact", NAME, "--set", *rules) == DONE
    section = load_evaluated(EvalConfig(draft=NAME), target).section
    assert (section["path"], section["sha256"]) == (NAME, published["sha256"])
    out = ["--to", "transformers", "--out", str(tmp_path / "out"), "--target", str(release / "target")]
    assert run(ExportConfig, exporting, NAME, *out) == DONE
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.num_assistant_tokens == 3


def test_an_export_serves_the_revision_of_the_target_that_the_draft_was_trained_for(hub, release, tmp_path):
    repository = upload(hub, "ann/target", release / "target")
    first, files, metadata = repository.head, repository.files, release / "artifact" / "draftsmith.json"
    for revision, now, named in (
        (first, {**files, "config.json": b"{}"}, rf"'/\S+/snapshots/{first}'"),
        (None, files, "'ann/target'"),
    ):
        repository.commit(now)
        values = json.loads(metadata.read_text())
        metadata.write_text(json.dumps(values | {"target": values["target"] | {"name": "ann/target", "revision": revision}}))
        out = tmp_path / f"out-{revision}"
        assert run(ExportConfig, exporting, str(release / "artifact"), "--to", "transformers", "--out", str(out)) == DONE
        assert re.search(rf"from_pretrained\({named}", (out / "serve.txt").read_text())


def test_a_revision_is_loaded_as_it_was_and_by_those_who_may(push, hub, monkeypatch):
    assert push()[0] == DONE
    repository = hub.repositories[NAME]
    first = repository.head
    repository.commit({**repository.files, "draftsmith.json": b"{}"})
    for token, revision in ((READER, "nosuch"), ("hf_" + "X" * 30, first)):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(InputError, match="could not be fetched from the Hub"):
            locate_artifact(f"{NAME}@{revision}")
    monkeypatch.setenv("HF_TOKEN", READER)
    assert read_metadata(locate_artifact(f"{NAME}@{first}")).kind == "draft_lm"
    with pytest.raises(InputError, match=r"draftsmith\.json"):
        read_metadata(locate_artifact(NAME))


def test_a_folder_goes_before_a_name_on_the_hub_and_what_is_neither_says_so(hub, tmp_path, monkeypatch):
    (tmp_path / "ann" / "draft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in (NAME, "/nosuch/folder"):
        assert str(locate_artifact(name)) == name
    assert hub.requests == []
    with pytest.raises(InputError, match=r"runs/nosuch is no folder here, and could not be fetched from the Hub"):
        locate_artifact("runs/nosuch")


def test_code_and_pickles_and_exports_are_not_fetched(push, hub, release):
    assert push("--set", "exports=[transformers]", "--target", str(release / "target"))[0] == DONE
    repository = hub.repositories[NAME]
    repository.commit({**repository.files, "modeling.py": b"raise SystemExit", "pytorch_model.bin": b"\x80"})
    there = {path.relative_to(locate_artifact(NAME)).as_posix() for path in locate_artifact(NAME).rglob("*")}
    assert "model.safetensors" in there
    assert not {name for name in there if name.endswith((".py", ".bin")) or "/" in name}


def test_a_target_loads_by_its_name_and_tells_its_licence(hub, release, target):
    card = b"---\nlicense: apache-2.0\nlanguage: en\n---\n"
    head = upload(hub, "ann/target", release / "target", **{"README.md": card}).head
    there = load_target(TargetConfig(name="ann/target", revision=head, dtype="float32", device="cpu"))
    assert there.identity.differences(target.identity) == []
    told = read_card("ann/target", head, online=True)
    assert (told.license, told.language) == ("apache-2.0", "en")
    asked = len(hub.requests)
    assert read_card("ann/target", head, online=False).license == "apache-2.0"  # in the cache by now
    assert len(hub.requests) == asked
    assert read_card("ann/nosuch", None, online=True).license is None


def test_pickled_weights_are_fetched_for_an_import_only(hub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({"w": torch.ones(2)}, tmp_path / TORCH_FILE)
    upload(hub, "bob/external", tmp_path)
    assert read_weights(locate_external("bob/external")).keys() == {"w"}
    assert {path.name for path in locate_external("bob/external").iterdir()} == {"config.json", TORCH_FILE}

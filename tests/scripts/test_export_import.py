"""`draftsmith export` and `draftsmith import` as a person runs them: there, back, and the draft that is refused."""

import importlib
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.command import BAD_INPUT, DONE, run_command
from configs.runtime.errors import InputError
from configs.schema.commands.release import ENGINES, ExportConfig, ImportConfig
from configs.schema.heads import MedusaSettings
from configs.schema.target import TargetConfig
from distill.dataset.conversations import read_conversations
from eval.release import read_artifact
from heads.families.registry import FAMILIES
from heads.formats.exporting.exporter import FORMS, PACKAGE
from heads.frozen.loading import load_target
from heads.metadata import read_metadata
from heads.proposers.vllm_suffix_lookup import ANSWERS
from tests.support.caches import random_conversations, write_rows
from tests.support.tiny_heads import save_artifact

importing = importlib.import_module("scripts.import_draft")
exporting = importlib.import_module("scripts.export")


@pytest.fixture
def folder(tmp_path, tiny_llama, tiny_tokenizer):
    """A folder with `target/`, which says one token again and again, and `artifact/`, a Medusa head that does too."""
    model = tiny_llama(dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[7, 0] = 5.0
        model.model.embed_tokens.weight[:, 0] = 100.0  # so that the final state's first feature is large and positive
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    target = load_target(TargetConfig(name=str(tmp_path / "target"), dtype="float32", device="cpu"))
    settings = MedusaSettings(kind="medusa", num_depths=3)
    head = FAMILIES["medusa"].build(settings, target.model, None)
    save_artifact(tmp_path / "artifact", head, target.identity.to_dict())
    return tmp_path


def run(schema, module, *argv):
    return run_command(schema, module.main, description="", argv=list(map(str, argv)), add_arguments=module.add_arguments)


def export(folder, engine="vllm", *more):
    return run(ExportConfig, exporting, folder / "artifact", "--to", engine, "--out", folder / "out", *more)


def import_(folder, *more):
    settings = {"name": folder / "target", "dtype": "float32", "device": "cpu"}
    target = [part for key, value in settings.items() for part in ("--set", f"target.{key}={value}")]
    trial = ["--set", "prompts=[w1 w2 w3]", "--set", "max_new_tokens=64"]
    return run(ImportConfig, importing, folder / "out", "--out", folder / "back", *target, *trial, *more)


def test_what_no_engine_is_given_is_refused_with_what_to_do(folder, capsys):
    (folder / "model.gguf").write_bytes(b"GGUF")
    out = ["--to", "vllm", "--out", folder / "out"]
    assert run(ExportConfig, exporting, folder / "artifact", *out, "--target", folder / "model.gguf") == BAD_INPUT
    assert "give the checkpoint that the file was made from, with --set allow_target_mismatch" in capsys.readouterr().err
    assert run(ExportConfig, exporting, folder / "target", *out) == BAD_INPUT
    assert "holds no draftsmith.json; eval/run.py and engines take a model as it is" in capsys.readouterr().err
    with pytest.raises(InputError, match="a gate's --artifact are for drafts that were trained or imported here"):
        read_artifact([folder / "target"])


def test_a_data_file_is_written_as_suffix_lookup_for_the_target_that_wrote_it(folder, capsys):
    data = write_rows(folder / "train.jsonl", random_conversations([(4, 9), (4, 5)], 60, seed=0))
    known = load_target(TargetConfig(name=str(folder / "target"), dtype="float32", device="cpu")).identity.to_dict()
    (folder / "manifest.json").write_text(json.dumps({"format_version": 1, "target": known}))
    assert run(ExportConfig, exporting, data, "--to", "vllm", "--out", folder / "out") == DONE
    assert f"PYTHONPATH={folder / 'out'} vllm serve {folder / 'target'} --spec" in capsys.readouterr().out
    (folder / "manifest.json").write_text(json.dumps({"format_version": 1, "target": known | {"tokenizer_sha256": "another"}}))
    assert run(ExportConfig, exporting, data, "--to", "vllm", "--out", folder / "other") == BAD_INPUT
    assert "the tokenizer of" in capsys.readouterr().err
    with np.load(folder / "out" / PACKAGE / ANSWERS) as stored:
        assert stored["lengths"].tolist() == [9, 5]
        assert stored["tokens"].tolist() == [token for row in read_conversations(data) for token in row.answer_ids]


def test_there_and_back(folder, capsys):
    assert export(folder) == DONE
    assert f"vllm serve {folder / 'target'} --speculative-config" in capsys.readouterr().out
    assert import_(folder) == DONE
    assert "medusa from Medusa, 2.94 accepted a round" in capsys.readouterr().out
    before, after = (load_file(folder / name / "model.safetensors") for name in ("artifact", "back"))
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert read_metadata(folder / "back").provenance["form"] == "Medusa"


def test_the_engines_of_the_command_are_those_of_the_table(folder, capsys):
    assert set(ENGINES) == set(FORMS)
    assert export(folder, "abacus") == BAD_INPUT
    assert "invalid choice: 'abacus'" in capsys.readouterr().err


def test_a_draft_that_is_not_accepted_is_refused_before_anything_is_written(folder, capsys, monkeypatch):
    assert export(folder) == DONE
    monkeypatch.setattr(importing, "accepted_per_round", lambda *_: 0.04)
    assert import_(folder) == BAD_INPUT
    assert "min_accepted_per_round" in capsys.readouterr().err
    assert not (folder / "back").exists()
    assert import_(folder, "--set", "min_accepted_per_round=0") == DONE

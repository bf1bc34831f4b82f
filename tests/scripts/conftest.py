"""Data written by the tiny target; a measured and judged release to publish, and a Hub of our own to publish it on."""

import importlib
import json
import shutil
from types import SimpleNamespace

import pytest

from configs.runtime.command import run_command
from configs.runtime.files import write_json
from configs.schema.commands.release import PushConfig
from configs.schema.data import DataConfig
from configs.schema.evaluation import GateConfig
from configs.schema.target import TargetConfig
from distill.generation.make_dataset import make_dataset
from eval import evaluation, gate
from tests.support.evaluations import tiny_evaluation
from tests.support.hub import TOKEN, Hub

PLANTED = "hf_" + "P" * 30
entry = importlib.import_module("scripts.push.__main__")


@pytest.fixture(scope="session")
def tiny_data(tiny_run, tmp_path_factory):
    """The config of a data set that the tiny target wrote into `output`; only for reading."""
    config = DataConfig(
        target=TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"),
        prompts={"source": "file", "path": str(tiny_run / "suite.jsonl")},
        answers={"max_new_tokens": 8},
        held_out_share=0.4,
        output=str(tmp_path_factory.mktemp("data")),
    )
    make_dataset(config)
    return config


@pytest.fixture(scope="session")
def recipe(tiny_data):
    """What recipes on the tiny data share, as a dict: target, data, schedule, held-out decoding."""
    files = {name: f"{tiny_data.output}/{name}.jsonl" for name in ("train", "held_out")}
    return {
        "target": tiny_data.target.model_dump(mode="json"),
        "data": files | {"max_length": 64},
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"batch_size": 3, "max_steps": 3, "mixed_precision": "no", "trackers": []},
        "held_out": {"num_prompts": 1, "decode": {"num_speculative_tokens": 2, "max_new_tokens": 4}},
        "num_speculative_tokens": 2,
    }


@pytest.fixture(scope="session")
def measured(tiny_run, tmp_path_factory):
    """A folder with `target/`, `artifact/` with paths and a token in its metadata, `evaluation/` with report and verdict."""
    folder = tmp_path_factory.mktemp("released")
    for name in ("target", "artifact"):
        shutil.copytree(tiny_run / name, folder / name)
    path = folder / "artifact" / "draftsmith.json"
    metadata = json.loads(path.read_text())
    metadata["target"]["name"] = str(folder / "target")
    metadata["training"] = {"data": {"train": "/home/alice/deals 2026/train.jsonl"}, "hub": {"token": PLANTED}}
    metadata["provenance"] = {"command": ["/home/alice/.venv/bin/python", "train/distill.py", "--set", f"hub.token={PLANTED}"]}
    path.write_text(json.dumps(metadata, indent=2) + "\n")
    (folder / "artifact" / "optimizer.pt").write_bytes(b"not for others")
    shutil.copy(tiny_run / "suite.jsonl", folder)
    decode = {"max_new_tokens": 10, "batch_size": 1}
    config = tiny_evaluation(folder, folder / "evaluation", num_prompts=6, decode=decode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.evaluation.render_html", lambda report: "")  # drawing takes longer than all the rest
        assert evaluation.evaluate(config) == 0
    assert judge(folder) == 0
    return folder


def change(path, alter):
    """Rewrite a JSON file."""
    value = json.loads(path.read_text())
    alter(value)
    write_json(path, value)  # as everything of ours is


def judge(folder, **settings):
    """Let the gate judge a release; return its exit code."""
    report = str(folder / "evaluation" / "report.json")
    rules = [{"metric": "acceptance.tokens_per_target_step", "min": 0.5}]
    config = GateConfig.model_validate({"rules": rules, "allow_unknown_training": True} | settings)
    return gate.main(config, SimpleNamespace(report=report, baseline=None, artifact=[], check=None))


@pytest.fixture
def release(measured, tmp_path, monkeypatch):
    """A copy of the release, for changing; its page is not drawn, and nobody waits."""
    shutil.copytree(measured, tmp_path / "release")
    monkeypatch.setattr("scripts.push.files.render_html", lambda report: "<html></html>")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return tmp_path / "release"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub in memory, with somebody logged in who may write."""
    hub = Hub(tmp_path / "cache")
    hub.replace(monkeypatch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture
def push(release, capsys):
    """A function that runs `draftsmith push` on the release and returns code, standard output and standard error."""

    def run(*more, repo_id="ann/draft"):
        report = release / "evaluation" / "report.json"
        argv = [str(release / "artifact"), "--report", str(report), "--repo-id", repo_id, *more]
        code = run_command(PushConfig, entry.main, description="", argv=argv, add_arguments=entry.add_arguments)
        said = capsys.readouterr()
        assert TOKEN not in said.out + said.err
        return code, said.out, said.err

    return run

"""`draftsmith run`: from a model to a verdict and an export, what goes on after a stop, what is refused before it begins."""

import json
import os
import re
import subprocess

import pytest

from configs.runtime.command import BAD_INPUT, DONE, INTERRUPTED, TERMINATED
from configs.runtime.files import CHECKOUT
from configs.runtime.loading import load_config
from configs.schema.commands.running import RunConfig
from scripts.run import flow
from tests.scripts.run.conftest import NUM_PROMPTS

GATE = "rules: [{metric: acceptance.tokens_per_target_step, min: 0.5}]"  # a random target's tokens are not to be guessed


def test_a_run_leads_to_a_verdict_and_an_export_and_its_file_goes_on(model, prompts, draftsmith, capsys, monkeypatch, tmp_path):
    (tmp_path / "gate.yaml").write_text(GATE)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "")
    settings = [
        "data.held_out_share=0.3",
        "train.schedule={epochs: 3, log_every_steps: 5}",
        "eval.suites=[]",
        "eval.baselines=[]",
    ]
    settings += [f"gate={tmp_path}/gate.yaml", f"prompts.num_prompts={NUM_PROMPTS + 1}", "eval.decode.max_new_tokens=12"]
    asked = ["run", model, "--prompts", prompts, "--budget", "20m", "--for", "sglang", "--set", *settings]
    # Answers of a random model are cut off: a few go on for longer.
    in_small = ["scripts/data.py", "scripts/data.py", "scripts/cache.py", "train/heads.py", "eval/run.py", "scripts.export"]
    assert draftsmith(*asked) == INTERRUPTED
    assert draftsmith.called == in_small
    draftsmith.stopped.append("eval/gate.py")
    assert draftsmith(*asked) == TERMINATED
    assert draftsmith.called == [*in_small[1:], "scripts.check", "eval/gate.py"]
    output = tmp_path / "runs" / "mine"
    assert draftsmith(*asked) == DONE
    assert draftsmith.called == ["eval/gate.py"]
    assert (output / "export" / "sglang" / "serve.txt").is_file()
    assert json.loads((output / "check" / "check.json").read_text())["checked"] is False
    assert draftsmith("watch", output) == DONE
    assert not (output / "dry_run").exists()

    file = output / "draft.yaml"
    chosen = load_config(RunConfig, file)
    assert chosen.prompts.num_prompts == NUM_PROMPTS
    assert chosen.train.items() >= {"schedule.epochs": 3, "schedule.log_every_steps": 5}.items()
    assert "schedule.checkpoint_every_steps" in chosen.train
    assert chosen.data["held_out_share"] == 0.3
    said = capsys.readouterr().out
    assert all(f"train.{key}: " in said for key in chosen.train)
    assert all(re.search(rf"{key} +as asked\n", said) for key in ("train.schedule.epochs: 3", "data.held_out_share: 0.3"))
    assert json.loads((output / "steps.json").read_text())["planned_minutes"] == chosen.minutes

    before = file.read_text()
    monkeypatch.setattr(flow.shutil, "which", lambda name: None)
    assert draftsmith("run", file, "--on", "slurm") == DONE  # says what to type where Slurm is
    assert file.read_text() == before  # the reasons, too
    monkeypatch.chdir(model)  # as a job, whose folder is another
    assert draftsmith("run", file, "--yes") == DONE
    assert draftsmith.called == []
    monkeypatch.chdir(tmp_path)
    file.write_text(file.read_text().replace("schedule.epochs: 3", "schedule.epochs: 1"))
    assert draftsmith("train", file) == DONE
    assert draftsmith.called == ["train/heads.py"]
    assert (output / "train.before-1").is_dir()


def test_other_weights_of_equal_size_and_time_are_another_input_of_a_run(tmp_path):
    run, weights = RunConfig.model_validate({"target": {"name": str(tmp_path)}}), tmp_path / "model.safetensors"
    found = set()
    for content in (b"a", b"b"):
        weights.write_bytes(content)
        os.utime(weights, ns=(0, 0))
        found.add(flow.inputs_of(run))
    assert len(found) == 2


def test_a_run_that_was_begun_is_not_taken_for_another(model, prompts, draftsmith, capsys, monkeypatch, tmp_path):
    draftsmith.stopped.append("scripts/data.py")
    same, other = ["--prompts", prompts, "--budget", "4m"], "configs/heads/dflash.yaml"
    assert draftsmith("run", model, *same, "--for", "vllm") == TERMINATED
    for arguments, sentence in (
        (["--budget", "5m"], "budget_minutes"),
        (["--budget", "4m", "--for", "gguf"], "engine"),
        (["--budget", "4m"], "prompts"),
        ([*same, "--set", f"recipe={other}"], "recipe"),
        ([*same, "--set", "train.schedule.epochs=3"], "train.schedule.epochs"),
        ([*same, "--set", "prompts.num_prompts=20", "target.images={}"], "target.images"),
    ):
        assert draftsmith("run", model, *arguments) == BAD_INPUT
        assert sentence in capsys.readouterr().err
    file = tmp_path / "runs" / "mine" / "draft.yaml"
    assert draftsmith("eval", file) == BAD_INPUT
    assert "draft.yaml" in capsys.readouterr().err
    monkeypatch.chdir(file.parent)
    for again in ([model, *same, "--output", file.parent], ["draft.yaml"]):
        draftsmith.stopped.append("scripts/data.py")
        assert draftsmith("run", *again) == TERMINATED
    assert not (file.parent / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompts", "none.csv"], "--prompts"),
        (["--budget", "soon"], "--budget"),
        (["--for", "abacus"], "invalid choice: 'abacus'"),
        (["--stage", "train"], "--stage"),
        (["--on", "slurm", "--stage", "train"], "--stage"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(model, draftsmith, arguments, sentence, capsys):
    assert draftsmith("run", model, *arguments) == BAD_INPUT
    assert sentence in capsys.readouterr().err
    assert draftsmith.called == []


def test_a_model_that_cannot_be_drafted_for_is_refused(draftsmith, tmp_path, capsys):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "t5"}')
    assert draftsmith("run", tmp_path / "bert") == BAD_INPUT
    assert "makes no causal LM" in capsys.readouterr().err


def test_make_passes_its_arguments_on_and_takes_none_from_the_environment(monkeypatch):
    monkeypatch.setenv("PROMPTS", "elsewhere.jsonl")

    def line(*arguments):
        command = ["make", "--no-print-directory", "-n", "demo", *arguments]
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[-1]

    assert line() == ".venv/bin/draftsmith run embedded:smollm2-135m-instruct --output runs/demo --budget 15m --yes"
    given = line("TARGET=./my model", "PROMPTS=p.csv", "BUDGET=2h")
    assert given == '.venv/bin/draftsmith run "./my model" --budget "2h" --yes --prompts "p.csv"'

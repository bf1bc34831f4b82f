"""A run from a model to an export: what is chosen, what goes on after a stop, and what is refused before it begins."""

import csv
import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from configs.runtime.command import BAD_INPUT, DONE, GATE_FAILED, INTERRUPTED, TERMINATED
from configs.runtime.errors import Stopped
from configs.runtime.files import CHECKOUT
from configs.runtime.loading import load_config
from configs.schema.commands.refreshing import RefreshConfig
from configs.schema.commands.running import RunConfig
from configs.schema.target import TargetConfig
from scripts import draftsmith
from scripts.refresh_steps import commands
from scripts.run import dry_run, jobs, stages

NUM_PROMPTS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_llama, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("model") / "mine"
    tiny_llama(seed=1, dtype=torch.float32, layers=8).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path):
    with (tmp_path / "prompts.csv").open("w") as file:
        csv.writer(file).writerows([["prompt"], *([f"w{n} w{2 * n % NUM_PROMPTS} w7"] for n in range(NUM_PROMPTS))])
    return tmp_path / "prompts.csv"


@pytest.fixture
def draftsmith_run(monkeypatch, tmp_path):
    """A function that gives arguments to `draftsmith`; its stages run in this process, and are listed in `called`."""
    called, stopped = [], []

    def in_this_process(arguments, log=None):
        entry = next(each for each in arguments if each.endswith(".py") or each.startswith("scripts."))
        called.append(entry)
        if entry in stopped:
            stopped.clear()
            raise Stopped("stopped by SIGTERM; run it again to go on")
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr(sys, "argv", [entry, *arguments[arguments.index(entry) + 1 :]])
        try:
            if entry.endswith(".py"):
                runpy.run_path(str(CHECKOUT / entry), run_name="__main__")
            else:
                runpy.run_module(entry, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code

    def run(*arguments):
        called.clear()
        monkeypatch.setattr(sys, "argv", ["draftsmith", *map(str, arguments)])
        for each in [name for name in sys.modules if name.startswith("scripts.") and name.endswith(".__main__")]:
            monkeypatch.delitem(sys.modules, each)  # another test may have imported it
        return draftsmith.main()

    monkeypatch.chdir(tmp_path)
    for module in (dry_run, stages):
        monkeypatch.setattr(module, "run_step", in_this_process)
    run.called, run.stopped = called, stopped
    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def test_a_run_leads_to_a_verdict_and_an_export_and_its_file_goes_on(
    model, prompts, draftsmith_run, capsys, monkeypatch, tmp_path
):
    asked = ["run", model, "--prompts", prompts, "--budget", "20m", "--for", "sglang", "--yes"]
    asked += ["--set", f"prompts.num_prompts={NUM_PROMPTS + 1}", "train.schedule={log_every_steps: 5}"]
    draftsmith_run.stopped.append("eval/gate.py")
    assert draftsmith_run(*asked) == TERMINATED
    assert draftsmith_run.called[5:] == [
        "scripts/data.py",
        "scripts/cache.py",
        "train/heads.py",
        "eval/run.py",
        "eval/gate.py",
    ]
    output = tmp_path / "runs" / "mine"
    assert draftsmith_run(*asked) == GATE_FAILED  # a random target's tokens are not to be guessed
    assert draftsmith_run.called == ["eval/gate.py", "scripts.export", "scripts.check"]
    assert (output / "export" / "sglang" / "serve.txt").is_file()
    assert json.loads((output / "check" / "check.json").read_text())["checked"] is False
    page = (output / "index.html").read_text()
    assert all(f'href="{path}"' in page for path in ("eval/report.html", "export/sglang/serve.txt", "check/check.json"))
    assert "http-equiv" not in page
    assert json.loads((output / "train" / "samples.json").read_text())["samples"]
    assert draftsmith_run("watch", output) == GATE_FAILED

    file = output / "draft.yaml"
    chosen = load_config(RunConfig, file)
    assert chosen.prompts.num_prompts == NUM_PROMPTS
    assert chosen.train["schedule.epochs"] == 10  # few prompts
    said = capsys.readouterr().out
    assert all(f"train.{key}: " in said for key in chosen.train)
    assert json.loads((output / "steps.json").read_text())["planned_minutes"] == chosen.minutes
    assert not (output / "rehearsal").exists()

    before, output_here = file.read_text().splitlines(), 'output: "runs/mine"'
    monkeypatch.setattr(jobs.shutil, "which", lambda name: None)
    assert draftsmith_run("run", file, "--on", "slurm") == DONE  # says what to type where Slurm is
    assert output_here in before
    there = [line.replace(output_here, f'output: "{output}"') for line in before]
    assert file.read_text().splitlines()[2:] == there[2:]  # the reasons, too
    monkeypatch.chdir(model)  # as a job, whose folder is another
    assert draftsmith_run("run", file, "--yes") == GATE_FAILED
    assert draftsmith_run.called == []
    monkeypatch.chdir(tmp_path)
    file.write_text(file.read_text().replace("schedule.epochs: 10", "schedule.epochs: 1"))
    assert draftsmith_run("train", file) == 0
    assert draftsmith_run.called == ["train/heads.py"]
    assert (output / "train.before-1").is_dir()


@pytest.mark.parametrize("name", ["base", "base.gguf"])
def test_what_decides_a_stage_is_the_same_however_the_output_is_spelled(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    run = RunConfig(target=TargetConfig(name=name), output="runs/mine", cache={}, train={}, data={}, eval={})
    there = run.model_copy(update={"output": str(tmp_path / "runs" / "mine")})
    assert [stages.decided_by(run, stage) for stage in run.stages] == [stages.decided_by(there, stage) for stage in run.stages]


@pytest.mark.parametrize(("engine", "written"), [("vllm", ["vllm", "suffix_lookup"]), ("sglang", ["sglang"])])
def test_vllm_gets_suffix_lookup_beside_the_draft(tmp_path, monkeypatch, engine, written):
    called = []
    monkeypatch.setattr(stages, "run_step", lambda arguments: called.append(arguments) or DONE)
    run = RunConfig(target=TargetConfig(name="base"), output=str(tmp_path), engine=engine)
    assert stages.make_step(run, "export").run() == DONE
    assert [Path(arguments[arguments.index("--out") + 1]).name for arguments in called] == written
    assert [arguments[1] for arguments in called][1:] == [str(tmp_path / "data" / "train.jsonl")] * (len(written) - 1)


def test_an_export_finds_a_target_on_the_hub_by_the_artifact_with_its_revision(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(commands.steps, "run_step", lambda arguments: called.append(arguments) or DONE)
    for name, named in (
        ("ann/target", []),
        ("embedded:smollm2-135m-instruct", []),
        (str(tmp_path), ["--target", str(tmp_path)]),
    ):
        target = TargetConfig(name=name, revision="abc" if name == "ann/target" else None)
        run = RunConfig(target=target, output=str(tmp_path), engine="vllm")
        assert stages.stage_command(run, "export")[6:] == named
        assert commands.export(RefreshConfig(target=target, exports=["vllm"]), tmp_path, tmp_path) == DONE
        assert called.pop()[6:] == named


def test_the_engine_gets_the_chat_template_that_the_draft_was_trained_with(tmp_path):
    run = RunConfig(target=TargetConfig(name="base", chat_template="plain"), output=str(tmp_path))
    assert stages.stage_command(run, "check")[-2:] == ["--set", "chat_template=plain"]
    run = RunConfig(target=TargetConfig(name="base", chat_template_kwargs={"enable_thinking": False}), output=str(tmp_path))
    assert stages.stage_command(run, "check")[-1] == 'chat_template_kwargs={"enable_thinking": false}'


def test_an_evaluation_asks_for_no_more_prompts_than_the_data_hold_out(tmp_path):
    run = RunConfig(output=str(tmp_path), eval={"suite.num_prompts": 18})
    path = tmp_path / "data" / "held_out.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"prompt_id": f"p{n // 2}"}) + "\n" for n in range(24)))  # of two turns each
    stages.stage_command(run, "eval")
    assert json.loads((tmp_path / "configs" / "eval.json").read_text())["suite"]["num_prompts"] == 12


def test_a_run_that_was_begun_is_not_taken_for_another(model, prompts, draftsmith_run, capsys, monkeypatch, tmp_path):
    draftsmith_run.stopped.append("scripts/data.py")
    same, other = ["--prompts", prompts, "--budget", "4m"], "configs/heads/dflash.yaml"
    assert draftsmith_run("run", model, *same, "--for", "vllm") == TERMINATED
    for arguments, sentence in (
        (["--budget", "5m"], "is of a run with the budget_minutes 4.0, and 5.0 is asked for"),
        (["--budget", "4m", "--for", "gguf"], "is of a run with the engine vllm, and gguf is asked for"),
        (["--budget", "4m"], "is of a run with the prompts"),
        ([*same, "--set", f"recipe={other}"], f"the recipe configs/heads/eagle3.yaml, and {other} is asked for"),
        ([*same, "--set", "train.schedule.epochs=3"], "the train.schedule.epochs None, and 3 is asked for"),
        ([*same, "--set", "prompts.num_prompts=20", "target.images={}"], "the target.images None, and {} is asked for"),
    ):
        assert draftsmith_run("run", model, *arguments) == BAD_INPUT
        assert sentence in capsys.readouterr().err
    file = tmp_path / "runs" / "mine" / "draft.yaml"
    assert draftsmith_run("eval", file) == BAD_INPUT
    assert "has no choices yet" in capsys.readouterr().err
    assert draftsmith_run("run", file, "--fresh") == BAD_INPUT
    assert "draft.yaml would be removed with its run; name the model" in capsys.readouterr().err
    monkeypatch.chdir(file.parent)
    for arguments in (["run", "draft.yaml"], ["eval", file]):
        assert draftsmith_run(*arguments) == BAD_INPUT
        assert f"not this file's folder; call from {tmp_path}, or set it to {file.parent}" in capsys.readouterr().err
    draftsmith_run.stopped.append("scripts/data.py")
    assert draftsmith_run("run", model, *same, "--output", file.parent) == TERMINATED
    assert not (file.parent / "runs").exists()
    monkeypatch.chdir(tmp_path)
    (file.parent / "data").mkdir()
    draftsmith_run.stopped.append("scripts/data.py")
    assert draftsmith_run("run", model, "--prompts", prompts, "--budget", "5m", "--fresh") == TERMINATED
    assert load_config(RunConfig, file).budget_minutes == 5
    assert not (file.parent / "data").exists()


@pytest.mark.parametrize(
    ("read", "sentence"),
    [(None, "holds no run"), ("mine", "mine would be removed with"), ("prompts.csv", "prompts.csv would be removed with")],
)
def test_fresh_removes_only_a_runs_folder_that_the_run_does_not_read(
    model, prompts, draftsmith_run, capsys, tmp_path, read, sentence
):
    output = tmp_path / "output"
    shutil.copytree(model, output / model.name)
    shutil.copy(prompts, output)
    if read is not None:
        (output / "draft.yaml").touch()
    model, prompts = (output / path.name if path.name == read else path for path in (model, prompts))
    assert draftsmith_run("run", model, "--prompts", prompts, "--output", output, "--fresh") == BAD_INPUT
    assert sentence in capsys.readouterr().err
    assert {path.name for path in output.iterdir()} >= {"mine", "prompts.csv"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompts", "none.csv"], "--prompts: none.csv is not there"),
        (["--budget", "soon"], "--budget must be a time above 0"),
        (["--for", "abacus"], "invalid choice: 'abacus'"),
        (["--stage", "train"], "--stage: name the draft.yaml of a run"),
        (["--on", "slurm", "--stage", "train"], "--stage: a job goes on with the whole of a run, got --on slurm"),
        (["--on", "k8s", "--fresh"], "--fresh: a job goes on with the whole of a run, got --on k8s"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(model, draftsmith_run, arguments, sentence, capsys):
    assert draftsmith_run("run", model, *arguments) == BAD_INPUT
    assert sentence in capsys.readouterr().err
    assert draftsmith_run.called == []


def test_prompts_that_are_too_few_are_refused(model, prompts, draftsmith_run, capsys):
    prompts.write_text("prompt\nw1 w2\nw1 w2\nw3 w4\n")
    assert draftsmith_run("run", model, "--prompts", prompts) == BAD_INPUT
    assert "holds 2 different prompts; at least 8 are needed" in capsys.readouterr().err
    assert draftsmith_run.called == []


def test_a_model_that_cannot_be_drafted_for_is_refused(draftsmith_run, tmp_path, capsys):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "t5"}')
    assert draftsmith_run("run", tmp_path / "bert") == BAD_INPUT
    assert "makes no causal LM" in capsys.readouterr().err


def test_a_terminal_is_asked_once_everything_is_chosen(model, prompts, draftsmith_run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "")
    asked = ["data.held_out_share=0.3", "train.schedule={epochs: 3, seed: 7}", "eval.repeats=2", "num_processes=1"]
    arguments = ["--prompts", prompts, "--budget", "4m", "--for", "sglang", "--set", *asked]
    assert draftsmith_run("run", model, *arguments) == INTERRUPTED
    assert len(draftsmith_run.called) == 5  # of the rehearsal
    said = capsys.readouterr().out
    assert "goes on" in said
    assert all(
        re.search(rf"{key} +as asked\n", said) for key in ("train.schedule.epochs: 3", "eval.repeats: 2", "num_processes: 1")
    )
    chosen = load_config(RunConfig, "runs/mine/draft.yaml")
    assert chosen.train.items() >= {"schedule.epochs": 3, "schedule.seed": 7}.items()
    assert "schedule.checkpoint_every_steps" in chosen.train
    assert (chosen.data["held_out_share"], chosen.eval["repeats"]) == (0.3, 2)


def test_make_passes_its_arguments_on_and_takes_none_from_the_environment(monkeypatch):
    monkeypatch.setenv("PROMPTS", "elsewhere.jsonl")

    def line(*arguments):
        command = ["make", "--no-print-directory", "-n", "demo", *arguments]
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[-1]

    assert line() == ".venv/bin/draftsmith run embedded:smollm2-135m-instruct --output runs/demo --budget 15m --yes"
    given = line("TARGET=./my model", "PROMPTS=p.csv", "BUDGET=2h")
    assert given == '.venv/bin/draftsmith run "./my model" --budget "2h" --yes --prompts "p.csv"'

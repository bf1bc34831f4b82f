"""The demo on somebody's own target: command lines that hold for it, a plan and a question first, and what is refused."""

import csv
import importlib
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.runtime.command import BAD_INPUT, DONE, INTERRUPTED
from configs.runtime.loading import load_config
from configs.schema.data import DataConfig
from configs.schema.evaluation import EvalConfig
from configs.schema.training import DistillConfig, HeadsConfig
from scripts import demo

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = {
    "scripts/make_data.py": DataConfig,
    "train/distill.py": DistillConfig,
    "train/heads.py": HeadsConfig,
    "eval/run.py": EvalConfig,
}
NUM_PROMPTS = 24


@pytest.fixture
def prompts(tmp_path):
    with (tmp_path / "prompts.csv").open("w") as file:
        csv.writer(file).writerows([["prompt"], *([f"w{n} w{2 * n} w7"] for n in range(NUM_PROMPTS))])
    return tmp_path / "prompts.csv"


@pytest.fixture
def loop(tiny_run, prompts, tmp_path, monkeypatch):
    """A function that runs the demo on the tiny target and returns its code and the steps, which do nothing."""
    run = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "run_step", lambda arguments: run.append(list(arguments)) or 0)
    before = signal.getsignal(signal.SIGTERM)

    def start(*argv, source=("--prompts", str(prompts))):
        run.clear()
        code = demo.main(["--target", str(tiny_run / "target"), "--device", "cpu", *source, *argv])
        return SimpleNamespace(code=code, steps=list(run))

    yield start
    signal.signal(signal.SIGTERM, before)


def configs_of(steps):
    """Return the config of each step that has one of these schemas, in order, checked."""
    loaded = []
    for arguments in steps:
        entry = next(each for each in arguments if each.endswith(".py"))
        if entry in SCHEMAS:
            changes = arguments[arguments.index("--set") + 1 :]
            loaded.append(load_config(SCHEMAS[entry], arguments[arguments.index("--config") + 1], changes))
    return loaded


def test_every_step_is_for_the_target_and_the_data_step_writes_what_the_next_ones_read(loop, tiny_run, tmp_path, capsys):
    done = loop("--set", "target.dtype=float32", "--set", "prompts.category=mine")
    assert done.code == DONE
    data, distil, heads, draft_eval, head_eval = configs = configs_of(done.steps)
    assert {each.target.name for each in configs} == {str(tiny_run / "target")}
    assert {(each.target.dtype, each.target.device) for each in configs} == {("float32", "cpu")}
    assert (data.prompts.category, data.prompts.path) == ("mine", str(tmp_path / "prompts.csv"))
    assert distil.student.layers == [0]  # of two blocks
    assert (distil.student.draft_vocab_size, heads.head.draft_vocab_size) == (None, None)  # of 64 tokens
    assert (draft_eval.draft, head_eval.draft) == (f"{distil.output}/artifact", f"{heads.output}/artifact")
    assert [each[1] for each in done.steps[-2:]] == [f"{each.output}/report.json" for each in (draft_eval, head_eval)]
    assert max(draft_eval.cost.context_tokens) < 256  # the target's context

    importlib.import_module("scripts.make_data").main(data)
    train, held_out = (tmp_path / path for path in (distil.data.train, distil.data.held_out))
    assert len(held_out.read_text().splitlines()) == 4
    assert draft_eval.suite.path == heads.data.held_out == distil.data.held_out

    assert loop("--fresh", source=("--data", str(train))).code == BAD_INPUT
    assert train.is_file()
    again = loop(source=("--data", str(train)))
    distil, *_, head_eval = configs_of(again.steps)
    assert len(again.steps) == len(done.steps) - 1
    assert distil.data.train == str(train)
    assert (head_eval.suite.path, head_eval.suite.num_prompts) == (str(held_out), 4)


def test_the_plan_comes_first_and_a_terminal_is_asked(loop, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda question: "")
    refused = loop()
    assert (refused.code, refused.steps) == (INTERRUPTED, [])
    plan = capsys.readouterr().out
    assert f"{NUM_PROMPTS} prompts" in plan
    assert "output in runs/demo-target" in plan
    assert "   head: train a Hydra head\n" in plan
    assert "training by configs/heads/demo.yaml: about 1.0 GiB and about 1 minutes" in plan
    assert len(loop("--yes").steps) == 7


def test_on_a_gpu_training_is_launched_there_and_no_times_are_guessed(loop, capsys):
    steps = loop("--device", "cuda").steps
    assert sum("configs/accelerate/one_gpu.yaml" in each for each in steps) == 2
    assert not any("configs/accelerate/one_process_cpu.yaml" in each for each in steps)
    assert " minutes" not in capsys.readouterr().out


def test_changed_prompts_are_answered_anew_and_what_was_made_before_is_kept(loop, prompts, tmp_path, capsys):
    assert len(loop().steps) == 7
    checkpoint = tmp_path / "runs" / "demo-target" / "distill" / "checkpoints"
    checkpoint.mkdir(parents=True)
    assert loop().steps == []
    assert checkpoint.exists()
    prompts.write_text(prompts.read_text().replace("w7", "w8"))
    capsys.readouterr()
    assert len(loop().steps) == 7
    assert not checkpoint.exists()
    assert (checkpoint.parent.with_name("distill.before-1") / "checkpoints").exists()
    assert "distill is of other settings; it is kept as runs/demo-target/distill.before-1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--data", "no.jsonl"], "--data: no.jsonl is not there"),
        (["--set", "schedule.epochs=1"], "the demo takes settings of target and prompts only"),
        (["--num-prompts", "3"], "--num-prompts must be 4 or more"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(loop, prompts, argv, sentence, capsys):
    source = () if "--data" in argv else ("--prompts", str(prompts))
    assert loop(*argv, source=source).code == BAD_INPUT
    assert sentence in capsys.readouterr().err


def test_make_passes_its_arguments_on_and_takes_none_from_the_environment(monkeypatch):
    monkeypatch.setenv("DATA", "elsewhere.jsonl")

    def line(*arguments):
        done = subprocess.run(
            ["make", "--no-print-directory", "-n", "demo", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()[-1].split("scripts/")[-1]

    assert line() == "demo.py"
    given = line("TARGET=./my model", "PROMPTS=p.csv", "DEVICE=cpu")
    assert given == 'demo.py --target "./my model" --prompts "p.csv" --device "cpu"'

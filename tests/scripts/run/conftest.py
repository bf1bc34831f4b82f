"""`draftsmith` with its stages in this process, a model and prompts for it, and a draft in service."""

import csv
import runpy
import signal
import sys

import pytest
import torch
from accelerate.state import AcceleratorState

from configs.runtime.command import DONE
from configs.runtime.errors import Stopped
from configs.runtime.files import CHECKOUT
from configs.schema.training import HeadsConfig
from scripts import cli
from scripts.run import drift, dry_run, stages
from train.launch import run_heads

NUM_PROMPTS = 30


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def head(recipe, tmp_path_factory):
    """A head trained on the tiny data, by a recipe that its artifact holds."""
    output = tmp_path_factory.mktemp("head")
    settings = {"head": {"kind": "medusa", "num_depths": 2}, "sanity": {"enabled": False}, "output": str(output)}
    assert run_heads(HeadsConfig.model_validate(recipe | settings)) == DONE
    return output / "artifact"


@pytest.fixture
def draftsmith(monkeypatch, tmp_path):
    """A function that gives arguments to `draftsmith`; its stages run in this process, and are listed in `called`.

    One that is put into `stopped` is stopped as by SIGTERM when it begins.
    """
    called, stopped = [], []

    def in_this_process(arguments, log=None):
        entry = next(each for each in arguments if each.endswith(".py") or each.startswith("scripts."))
        called.append(entry)
        if entry in stopped:
            stopped.clear()
            raise Stopped("stopped by SIGTERM")
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr(sys, "argv", [entry, *arguments[arguments.index(entry) + 1 :]])
        try:
            if entry.endswith(".py"):
                runpy.run_path(str(CHECKOUT / entry), run_name="__main__")
            else:
                runpy.run_module(entry, run_name="__main__")
        except SystemExit as end:
            return end.code

    def run(*arguments):
        called.clear()
        monkeypatch.setattr(sys, "argv", ["draftsmith", *map(str, arguments)])
        for name in [name for name in sys.modules if name.startswith("scripts.") and name.endswith("__main__")]:
            monkeypatch.delitem(sys.modules, name)  # runpy warns of a module that was imported before
        return cli.main()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for module in (drift, dry_run, stages):
        monkeypatch.setattr(module, "run_step", in_this_process)
    run.called, run.stopped = called, stopped
    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)
    AcceleratorState._reset_state(reset_partial_state=True)

"""One command runs every benchmark: each name has its config, whose mistakes are reported before anything heavy is imported."""

import importlib

import pytest

from configs.runtime.command import BAD_INPUT, DONE
from scripts.lab import benchmark
from scripts.lab.benchmark import BENCHMARKS, run


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_name_runs_its_function_on_its_config(name, monkeypatch):
    entry, configs = BENCHMARKS[name], []
    module, _, function = entry.function.rpartition(".")
    assert callable(getattr(importlib.import_module(f"scripts.lab.{module}"), function))
    monkeypatch.setattr(benchmark, "check_place", lambda output: None)  # this tree may be a dirty one
    monkeypatch.setattr(benchmark, "import_module", lambda module: type("Module", (), {function: configs.append}))
    assert run(["--config", "/dev/null", name]) == DONE
    assert configs == [entry.config()]


@pytest.mark.parametrize("argv", [[], ["nosuch"], ["--config", "decode"]])
def test_without_a_known_name_the_command_says_what_is_missing(argv, capsys):
    assert run(argv) == BAD_INPUT
    assert "NAME" in capsys.readouterr().err

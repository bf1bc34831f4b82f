"""What a person runs: every recipe loads, every command has a help and an exit code for each kind of mistake."""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from configs.runtime.loading import load_config, parse_yaml
from configs.schema.commands.planning import PlanHeadsConfig
from configs.schema.data import CacheConfig, DataConfig
from configs.schema.evaluation import EvalConfig, GateConfig
from configs.schema.training import DistillConfig, HeadsConfig
from scripts.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = {
    "cache": CacheConfig,
    "data": DataConfig,
    "distill": DistillConfig,
    "eval": EvalConfig,
    "gates": GateConfig,
    "heads": HeadsConfig,
    "plan": PlanHeadsConfig,
}
OTHER_TOOLS = {"accelerate", "deepspeed"}  # their files are YAML, and checked by the tool itself
RECIPES = sorted((ROOT / "configs").glob("*/*.yaml"))
NEEDED = {  # arguments without which a command only says that they are missing
    "gate": ["report.json"],
    "compare": ["one.json", "other.json"],
    "export": ["artifact", "--to", "vllm", "--out", "out"],
    "check": ["export", "--engine", "vllm", "--out", "out"],
    "import": ["draft", "--out", "out"],
    "push": ["artifact", "--report", "report.json", "--repo-id", "name"],
}
WITHOUT_CONFIG = {"watch", "doctor"}
UNKNOWN_KEY = ("--set", "nosuch.key=1")
UNKNOWN = "error: --set nosuch.key: unknown key 'nosuch'; --keys lists the known ones\n"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_recipe_loads_under_the_schema_of_its_folder(recipe):
    if recipe.parent.name in OTHER_TOOLS:
        assert isinstance(parse_yaml(recipe.read_text(encoding="utf-8"), str(recipe)), dict)
    else:
        load_config(SCHEMAS[recipe.parent.name], recipe)


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - WITHOUT_CONFIG))
def test_a_command_has_a_help_and_answers_an_unknown_key_with_one_line(command, monkeypatch, capsys, tmp_path):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [command, *arguments])
        monkeypatch.delitem(sys.modules, COMMANDS[command][0], raising=False)  # runpy warns of one that a test imported before
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(COMMANDS[command][0], run_name="__main__")
        return ended.value.code

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert run("--help") == 0
    assert "--config FILE" in capsys.readouterr().out
    assert run(*NEEDED.get(command, ()), *UNKNOWN_KEY) == 2
    assert capsys.readouterr().err == UNKNOWN
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("entry", ["train/distill.py", "train/heads.py", "eval/run.py"])
def test_an_entry_runs_as_a_script_from_another_folder(entry, tmp_path):
    command = [sys.executable, str(ROOT / entry), *UNKNOWN_KEY]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (2, UNKNOWN)


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [("ModuleNotFoundError('No module named x', name='x')", 2, 1), ("ImportError('undefined symbol')", 70, None)],
)
@pytest.mark.parametrize("entry", [["train/heads.py"], ["eval/gate.py", "report.json"], ["-m", "scripts.cli", "plan"]])
def test_an_entry_whose_imports_fail_does_not_end_like_a_failed_gate(entry, error, code, lines, tmp_path):
    (tmp_path / "pydantic.py").write_text(f"raise {error}")
    command, environment = [sys.executable, *entry], os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code
    assert lines is None or done.stderr.count("\n") == lines


def test_configs_the_gate_and_watching_a_run_do_without_torch():
    names = ("configs.schema.training", "configs.schema.evaluation", "eval.gate", COMMANDS["watch"][0])
    imports = "; ".join(f"import {name}; 'torch' in sys.modules and sys.exit('{name}')" for name in names)
    command = [sys.executable, "-c", f"import sys; {imports}"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stderr == ""


def test_every_command_names_a_module_that_is_there_and_another_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draftsmith", "trane"])
    assert main() == 2
    assert "no command 'trane'; there are run, plan" in capsys.readouterr().err
    assert [name for name, (module, _) in COMMANDS.items() if importlib.util.find_spec(module) is None] == []

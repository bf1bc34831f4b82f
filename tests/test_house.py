"""The house as a whole: names, recipes, the README's commands, the entries run as scripts, the set-up on a bare machine."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from configs.runtime.loading import load_config, parse_yaml
from configs.schema.commands.planning import PlanHeadsConfig
from configs.schema.commands.refreshing import RefreshConfig
from configs.schema.data import CacheConfig, DataConfig
from configs.schema.evaluation import EvalConfig, GateConfig
from configs.schema.training import DistillConfig, HeadsConfig

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = {
    "cache": CacheConfig,
    "data": DataConfig,
    "distill": DistillConfig,
    "eval": EvalConfig,
    "gates": GateConfig,
    "heads": HeadsConfig,
    "plan": PlanHeadsConfig,
    "refresh": RefreshConfig,
}
PAGES_WITH_COMMANDS = (
    "walks",
    "troubleshooting",
    "coming-from",
    "data",
    "training",
    "decoding",
    "releasing",
    "modalities",
)
OTHER_TOOLS = {"accelerate", "deepspeed"}  # their files are YAML, and checked by the tool itself
RECIPES = sorted((ROOT / "configs").glob("*/*.yaml"))
ENTRIES = {
    "train/distill.py": [],
    "train/heads.py": [],
    "eval/run.py": [],
    "eval/gate.py": ["report.json"],
    "eval/compare.py": ["one.json", "other.json"],
    "scripts.check": ["export", "--engine", "vllm", "--out", "out"],
    "scripts/cache.py": [],
    "scripts/data.py": [],
    "scripts/plan.py": [],
    "scripts.serve_states": [],
    "scripts.export": ["artifact", "--to", "vllm", "--out", "out"],
    "scripts.import_draft": ["draft", "--out", "out"],
    "scripts.push": ["artifact", "--report", "report.json", "--repo-id", "name"],
    "scripts/refresh.py": [],
}


def relative(path):
    return path.relative_to(ROOT).as_posix()


def schema_of(path):
    return SCHEMAS.get(Path(path).parent.name)


@pytest.mark.parametrize("recipe", RECIPES, ids=relative)
def test_every_recipe_loads_under_the_schema_of_its_folder_and_opens_with_its_launch_line(recipe):
    text, schema = recipe.read_text(encoding="utf-8"), schema_of(relative(recipe))
    if recipe.parent.name in OTHER_TOOLS:
        assert isinstance(parse_yaml(text, str(recipe)), dict)
    else:
        assert isinstance(load_config(schema, recipe), schema)
    opening = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    launches = [line for line in opening if re.search(r"\b(python|accelerate launch) ", line) and relative(recipe) in line]
    assert launches, f"{relative(recipe)} does not open with a comment that holds the command it is for"
    for launch in launches:
        assert missing_from(launch.lstrip("# ")) == []


def test_every_test_that_the_makefile_runs_exists():
    named = re.findall(r"\btests/[\w/.]*\w", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_commands_of_the_readme_exist():
    assert_commands_exist((ROOT / "README.md").read_text(encoding="utf-8"))


def assert_commands_exist(text):
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    assert commands
    assert [(command, missing_from(command)) for command in commands if missing_from(command)] == []
    configs = [config for command in commands if (config := config_of(shlex.split(command, comments=True))) is not None]
    asked = max((each.min_prompts for each in configs if isinstance(each, GateConfig)), default=0)
    sizes = [each.suite.num_prompts for each in configs if isinstance(each, EvalConfig)]
    assert not asked or [size for size in sizes if size is not None and size < asked] == []


def config_of(words):
    """Return the config that a command line describes, if it has one that the schemas here know."""
    file = next((word for before, word in itertools.pairwise(words) if before == "--config"), None)
    plans = "scripts/plan.py" in words or words[:2] == ["draftsmith", "plan"]
    schema = PlanHeadsConfig if plans else schema_of(file or "")
    changes = [word for word in words if re.match(r"[a-z]\w*(\.\w+)*=", word)]
    return None if file is None or schema is None else load_config(schema, ROOT / file, changes)


@pytest.mark.parametrize("document", PAGES_WITH_COMMANDS)
def test_every_command_in_a_document_exists(document):
    assert_commands_exist((ROOT / "docs" / f"{document}.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=relative)
def test_every_file_that_a_document_names_exists(document):
    # A table's command is that of the commit that measured; the page on adding a family makes two files of its own.
    text = re.sub(r"<!-- table: .*?<!-- end -->", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    folders = "configs|heads|distill|eval|train|scripts|tests"
    named = re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]+\.(?:py|yaml|sh|md)\b", text)
    linked = re.findall(r"\]\(([\w./-]+\.md)\)", text)
    made = {"heads/families/recurrent.py", "configs/heads/recurrent.yaml"}
    assert [path for path in named if not (ROOT / path).is_file() and path not in made and "FILE" not in path] == []
    assert [path for path in linked if not (document.parent / path).is_file()] == []


def missing_from(command: str) -> list[str]:
    """Name the make targets, scripts and config files of a shell command that are not there; outputs under runs/ are exempt."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    words = shlex.split(command, comments=True)
    pairs = list(zip(["", *words], words, strict=False))
    made = [word for before, word in pairs if before == "make"]
    paths = [word for before, word in pairs if word.endswith(".py") or before in ("--config", "--config_file")]
    return [f"make {target}" for target in made if target not in targets] + [
        path for path in paths if not path.startswith("runs/") and not (ROOT / path).is_file()
    ]


UNKNOWN_KEY = ("--set", "nosuch.key=1")
UNKNOWN = "error: --set nosuch.key: unknown key 'nosuch'; --keys lists the known ones\n"


@pytest.fixture
def run_entry(monkeypatch, tmp_path):
    """A function that runs an entry in this process, in an empty folder, and returns its exit code."""

    def run(entry, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "argv", [str(ROOT / entry), *arguments])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        as_file = partial(runpy.run_path, str(ROOT / entry))
        start = as_file if entry.endswith(".py") else partial(runpy.run_module, entry, alter_sys=True)
        for module in (entry, f"{entry}.__main__"):  # other tests may have imported them
            monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(SystemExit) as ended:
            start(run_name="__main__")
        return ended.value.code

    return run


@pytest.mark.parametrize("entry", ENTRIES)
def test_each_entry_has_a_help_and_answers_an_unknown_key_with_one_line(entry, run_entry, capsys, tmp_path):
    assert run_entry(entry, "--help") == 0
    assert "--config FILE" in capsys.readouterr().out
    assert run_entry(entry, *ENTRIES[entry], *UNKNOWN_KEY) == 2
    assert capsys.readouterr().err == UNKNOWN
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("entry", ["train/heads.py", "scripts/plan.py"])
def test_an_entry_runs_as_a_script_from_another_folder(entry, tmp_path):
    command = [sys.executable, str(ROOT / entry), *ENTRIES[entry], *UNKNOWN_KEY]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (2, UNKNOWN)


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [("ModuleNotFoundError('No module named x', name='x')", 2, 1), ("ImportError('undefined symbol')", 70, None)],
)
def test_an_entry_whose_imports_fail_does_not_end_like_a_failed_gate(error, code, lines, tmp_path):
    (tmp_path / "pydantic.py").write_text(f"raise {error}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for entry in [*(each for each in ENTRIES if each.endswith(".py")), "scripts/cli.py"]:
        command = [sys.executable, str(ROOT / entry), *ENTRIES.get(entry, ())]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, entry
        assert lines is None or done.stderr.count("\n") == lines


WITHOUT_TORCH = (
    *("configs.runtime.command", "configs.runtime.run_record", "configs.schema.training", "configs.schema.evaluation"),
    *("eval.gate", "scripts.watch.__main__", "scripts.watch.page"),
)


def test_configs_the_gate_and_looking_in_on_a_run_do_without_torch():
    imports = "; ".join(f"import {name}; 'torch' in sys.modules and sys.exit('{name}')" for name in WITHOUT_TORCH)
    command = [sys.executable, "-c", f"import sys; {imports}"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stderr == ""

"""The pages that people work by: their commands are accepted, their tables are the results' and the planner's."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from configs.runtime.loading import load_config
from configs.schema.commands.planning import PlanHeadsConfig
from configs.schema.commands.running import STAGES
from heads.families.registry import FAMILIES
from heads.formats.exporting.exporter import engines_of
from scripts.bench.tables import documents, fill_tables
from scripts.cli import COMMANDS
from tests.support.caches import random_conversations, write_rows
from tests.test_entries import WITHOUT_CONFIG
from train.plan.models import count
from train.plan.plan import GIBIBYTE, make_plan

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
SEPARATORS = {"|", ">", ">>", "&&", ";", "&", "2>"}


def read(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def commands_in(text: str) -> list[list[str]]:
    """Return the words of each command in the shell blocks of a page."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = []
    for words in (shlex.split(line, comments=True) for line in lines):
        end = next((place for place, word in enumerate(words) if word in SEPARATORS), len(words))
        commands.append(words[:end])
    return [words for words in commands if words]


@pytest.fixture
def objection(monkeypatch, capsys):
    """A function that has our program in a command read its arguments and config, and returns what it says against them."""

    def read_by_its_program(words: list[str]) -> str | None:
        if "make" in words:
            return next((f"no target {word}" for word in words[1:] if "=" not in word and word not in TARGETS), None)
        if words[:2] == ["vllm", "serve"] and "--served-model-name" in words and "--host" not in words:
            return "a server that asks for no key listens on all interfaces"
        script = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
        if "draftsmith" in words:
            name, *arguments = words[words.index("draftsmith") + 1 :]
            if name in STAGES and arguments and arguments[0].endswith(".yaml"):
                return None
            if name in WITHOUT_CONFIG or name not in COMMANDS:
                return None if name in COMMANDS else f"no command {name}"
            run, what = runpy.run_module, COMMANDS[name][0]
        elif script is not None and not words[script].startswith("runs/"):
            run, what, arguments = runpy.run_path, str(ROOT / words[script]), words[script + 1 :]
        else:
            return None
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "argv", [what, *arguments, *([] if "--help" in arguments else ["--print-config"])])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        monkeypatch.delitem(sys.modules, what, raising=False)  # runpy warns of one that a test imported before
        with pytest.raises(SystemExit) as ended:
            run(what, run_name="__main__")
        said = capsys.readouterr().err
        return said if ended.value.code else None

    return read_by_its_program


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name)
def test_every_command_of_a_page_is_accepted_and_every_link_leads_to_a_page(page, objection):
    text = page.read_text(encoding="utf-8")
    refused = {" ".join(words): said for words in commands_in(text) if (said := objection(words)) is not None}
    assert refused == {}
    assert [path for path in re.findall(r"\]\(([\w./-]+\.md)\)", text) if not (page.parent / path).is_file()] == []


def rows_under(text: str, title: str) -> list[list[str]]:
    """Return the cells of the first table under a title, without its header."""
    section = text.partition(f"{title}\n")[2]
    lines = re.search(r"^(?:\|.*\n)+", section, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def planned(words: list[str]) -> list[str]:
    changes = [word for word in words if re.match(r"[a-z]\w*(\.\w+)*=", word)]
    plan = make_plan(load_config(PlanHeadsConfig, ROOT / words[words.index("--config") + 1], changes))
    return [
        f"`{plan.fitting.engine.name}`",
        f"{plan.fitting.num_bytes / GIBIBYTE:.0f} GiB",
        f"{count(plan.models.draft, trained=True) / 1e6:,.0f} million",
        f"{plan.cache_row_bytes * plan.cache_rows / 1e12:.1f} TB",
        f"{plan.checkpoint_bytes / 1e9:.1f} GB",
    ]


def test_the_plans_of_the_walks_are_the_planners(monkeypatch):
    monkeypatch.chdir(ROOT)
    plans = [planned(words) for words in commands_in(read("walks")) if words[:2] == ["draftsmith", "plan"]]
    assert [row[1:] for row in rows_under(read("walks"), "## What the plans say")] == plans


def test_the_table_of_families_names_the_engines_that_take_each():
    rows = [
        (re.findall(r"`([^`]+)`", row[0]), re.findall(r"`([^`]+)`", row[-1]))
        for row in rows_under(read("walks"), "## Which draft")
    ]
    assert {name for (name, *_), _ in rows} == {*FAMILIES, "draft_lm"}
    assert {name: set(engines) for (name, *_), engines in rows} == {name: set(engines_of(name)) for (name, *_), _ in rows}


@pytest.mark.parametrize("page", documents(), ids=lambda page: page.name)
def test_a_pages_tables_are_those_of_the_results_files(page):
    text = page.read_text(encoding="utf-8")
    assert fill_tables(text, RESULTS) == text, "run make tables"


# --- docs/serving.md: the library -----------------------------------------------------------------------------------------


def test_the_library_lines_run(tiny_run, tmp_path, capsys):
    first, with_lookup = re.findall(r"```python\n(.*?)```", read("serving").partition("# As a library")[2], re.DOTALL)
    for name, place in {"embedded:smollm2-135m-instruct": "target", "runs/demo/train/artifact": "artifact"}.items():
        assert name in first
        first = first.replace(name, str(tiny_run / place))
    names = {}
    exec(first, names)  # the page is the project's own
    assert capsys.readouterr().out.strip()
    plain = names["answer"]
    data = write_rows(tmp_path / "train.jsonl", random_conversations([(4, 9)], 60, seed=0))
    exec(with_lookup.replace("runs/demo/data/train.jsonl", str(data)), names)
    assert names["answer"] == plain

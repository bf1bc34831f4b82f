"""Every figure of README.md and docs/ is that of a results file, and every results file can be made again by its command."""

import json
import re
from pathlib import Path

import pytest

from scripts.lab.bench.tables import OPENING, documents, fill_tables, present_command
from tests.test_house import missing_from

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"

ARCHIVES = {"archive", "modalities"}  # figures that no command makes any more, each with its commit

MEASURED = re.compile(r"\b(tau|alpha|speedup|seconds|measured)\b|τ|α")  # in the header of a table
INTERVAL = re.compile(r"\[[+-]?\d+(\.\d+)?, [+-]?\d+(\.\d+)?\]")
VERSION = r"(?:Python|Apache-|vLLM|transformers|GenAI|speculators|trl==) ?"


def objections(name: str) -> list[str]:
    """Return what speaks against a results file: commands that cannot be given again, and trees that are no commit's."""
    found: list[str] = []

    def look_at(value):
        if isinstance(value, list):
            for each in value:
                look_at(each)
        elif isinstance(value, dict):
            command = value.get("command")
            if isinstance(command, str):
                command = present_command(command)
                found.extend(missing_from(command))
                recipes = re.findall(r"(?:scripts/lab/)?configs/[\w./-]+\.yaml", command)
                found.extend(path for path in recipes if not (ROOT / path).is_file())
                found.extend(re.findall(r"runs/\S+-[0-9a-f]{12}", command))  # a folder that training names by its content
            if "dirty" in value and (value["dirty"] is not False or value["commit"] is None):
                found.append(f"made at {value['commit']}, dirty: {value['dirty']}")
            for each in value.values():
                look_at(each)

    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert {"command", "git", "hardware", "versions"} <= content.keys()
    look_at(content)
    return found + ["rows of several commands"] * bool(content.get("measured_before"))


@pytest.mark.parametrize("name", sorted({path.stem for path in RESULTS.glob("*.json")} - ARCHIVES))
def test_a_results_file_is_of_a_command_that_is_there_and_of_one_commit(name):
    assert objections(name) == []


def test_every_file_that_a_document_shows_is_there():
    shown = {match[1] for page in documents() for match in OPENING.finditer(page.read_text(encoding="utf-8"))}
    there = {path.stem for path in RESULTS.glob("*.json")}
    assert not shown - there


def prose_of(page: Path) -> str:
    """Return a document without what commands fill, blocks and spans of code, each of which ends a line."""
    text = re.sub(r"<!-- table: .*?<!-- end -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "", text)


@pytest.mark.parametrize("page", documents(), ids=lambda page: page.name)
def test_a_documents_figures_are_those_of_the_results_files(page):
    text = page.read_text(encoding="utf-8")
    assert fill_tables(text, RESULTS) == text, "run make tables"
    prose = prose_of(page)
    flowing = re.sub(r"\s+", " ", prose)
    assert [match[0] for match in INTERVAL.finditer(flowing)] == []  # a measured figure: in a table, or not at all
    headers = re.findall(r"^(\|.*\|)\n\| ?:?-", prose, flags=re.MULTILINE)
    assert [header for header in headers if MEASURED.search(header)] == []
    if page.name in ("README.md", "benchmarks.md"):
        flowing = re.sub(rf"{VERSION}\d+(\.\d+)+", "", flowing)
        assert re.findall(r".{0,40}\d\.\d.{0,20}", flowing) == []

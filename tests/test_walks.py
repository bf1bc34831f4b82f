"""The walk of docs/architecture.md from a prompt to a report: each file is imported by one before it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAX_FILES = {"From a prompt to `report.json`": 30}


def files_of(title):
    """Return the numbered files of a walk, in order."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [found for line in re.findall(r"^\d+\..*", section, re.MULTILINE) for found in re.findall(r"`([\w/]+\.py)`", line)]


def imported_by(file):
    """Return the files that one imports, inside its functions too."""
    modules = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {each.name for each in node.names}
    return {f"{module.replace('.', '/')}.py" for module in modules}


@pytest.mark.parametrize("title", MAX_FILES)
def test_each_file_of_a_walk_is_imported_by_one_before_it(title):
    files = files_of(title)
    assert len(files) == len(set(files)) <= MAX_FILES[title]
    known = imported_by(files[0])
    for file in files[1:]:
        assert (ROOT / file).is_file(), file
        assert file in known, f"no earlier file of the walk imports {file}"
        known |= imported_by(file)

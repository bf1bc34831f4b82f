"""The two walks of docs/architecture.md: each file is reached from one before it, by an import or by a table of names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAX_STEPS = {"From a conversation to a gradient (EAGLE-3)": 16, "From a prompt to `report.json`": 28}


def steps_of(title):
    """Return the files that each step of a walk names, in order."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [re.findall(r"`([\w/]+\.py)`", line) for line in re.findall(r"^\d+\..*", section, re.MULTILINE)]


def reached_from(file):
    """Return the files that one imports, inside its functions too, or names as a neighbour."""
    modules = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {each.name for each in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            modules.add(f"{Path(file).parent.as_posix().replace('/', '.')}.{node.value}")
    return {f"{module.replace('.', '/')}.py" for module in modules}


@pytest.mark.parametrize("title", MAX_STEPS)
def test_each_file_of_a_walk_is_reached_from_one_before_it(title):
    steps = steps_of(title)
    named = [file for step in steps for file in step]
    assert len(steps) <= MAX_STEPS[title]
    assert len(named) == len(set(named)) >= len(steps)
    known = reached_from(named[0])
    for first, *others in steps:
        for file in [*others, first]:  # a step may name what leads to its file
            if file != named[0]:
                assert file in known, f"no earlier file of the walk leads to {file}"
            known |= reached_from(file)

"""docs/architecture.md leads from a conversation to a gradient in at most 16 files, each reached from one before it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imports_of(file):
    """Return the modules that a file imports, as paths; those too that a table of its folder names."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(f"{Path(file).parent.as_posix().replace('/', '.')}.{node.value}")
    return {f"{name.replace('.', '/')}.py" for name in names}


def test_each_file_of_the_walk_is_imported_by_one_before_it():
    page = (ROOT / "docs/architecture.md").read_text()
    walk = page.partition("## From a conversation to a gradient")[2].partition("\n## ")[0]
    steps = [re.findall(r"`([\w/]+\.py)`", step) for step in re.split(r"^\d+\. ", walk, flags=re.MULTILINE)]
    (entry, *_), *steps = steps
    assert len(steps) <= 16
    reached, passed = imports_of(entry), {entry}
    for file, *between in [steps[0][:1], *steps[1:-1], steps[-1][:1]]:
        for each in between:
            assert each in reached, f"{each} is imported by none of {passed}"
            reached |= imports_of(each)
        assert file in reached, f"{file} is imported by none of {passed}"
        passed.add(file)
        reached |= imports_of(file)

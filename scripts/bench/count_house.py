"""Count what the project has to carry, and fail above the limits in pyproject.toml: `python -m scripts.bench.count_house`.

`make check` ends with it.
Lines are those of Python files that git tracks; modules are the project's own that an entry imports, directly or not; recipes
are YAML files in configs/; targets are those of the Makefile.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("configs", "heads", "distill", "eval", "train", "scripts")


def main() -> int:
    """Print each count beside its limit and return 1 if one is above it."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["draftsmith"]["limits"]
    found = counts([name for name in limits if name.startswith("modules behind ")])
    for name, limit in limits.items():
        print(f"{name:32} {found[name]:6,} of {limit:,}{'' if found[name] <= limit else '   ABOVE THE LIMIT'}")
    return int(any(found[name] > limit for name, limit in limits.items()))


def counts(entries: list[str]) -> dict[str, int]:
    """Return every count by the name of its limit; `entries` are those of modules, such as "modules behind eval.run"."""
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    lines = {file: (ROOT / file).read_text(encoding="utf-8").count("\n") for file in files if (ROOT / file).is_file()}
    graph = grimp.build_graph(*PACKAGES)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {
        "lines outside tests": sum(count for file, count in lines.items() if not file.startswith("tests/")),
        "lines of benchmarks": sum(count for file, count in lines.items() if file.startswith("scripts/bench/")),
        "lines of tests": sum(count for file, count in lines.items() if file.startswith("tests/")),
        "recipes": len(list((ROOT / "configs").glob("*/*.yaml"))),
        "make targets": len(re.findall(r"^[a-z][a-z-]*:", makefile, re.MULTILINE)),
    } | {name: len(graph.find_upstream_modules(name.removeprefix("modules behind "))) for name in entries}


if __name__ == "__main__":
    sys.exit(main())

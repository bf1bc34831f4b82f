"""Plant each bug of tests/mutants.yaml by itself, run the test that is to find it, and say which bugs are not found.

`python -m scripts.bench.mutants [--only PATTERN] [--workers N]`. A bug is a text of a file, which must stand there once, and
what takes its place. It is planted in a copy of the files that git tracks, so the checkout stays as it is. Exit code 1 where a
bug is not found or cannot be planted, or its test is not there. All of them, from a commit's clean tree, go into proof.json.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue

from configs.runtime.files import CHECKOUT, read_json, read_text, write_json
from configs.runtime.loading import parse_yaml
from configs.runtime.run_record import describe_git

TEST_FAILED = 1  # exit code of pytest
FOUND, NOT_FOUND, NOT_PLANTED, NO_TEST = "found", "NOT FOUND", "CANNOT BE PLANTED", "NO SUCH TEST"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A bug to be planted: `old` becomes `new` in `file`; `test` is what pytest is given, files or tests."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def outcome(self, root: Path) -> str:
        """Plant the bug below `root`, run its test, and take it out again; where pytest cannot run the test, say so."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.old) != 1:
            return NOT_PLANTED
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        try:
            code = run_test(self.test, root)
        finally:
            path.write_text(text, encoding="utf-8")
        if code == TEST_FAILED:
            return FOUND
        return NOT_FOUND if code == 0 else NO_TEST


def run_test(test: str, root: Path) -> int:
    """Return pytest's exit code: 1 where a test fails, 0 where all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--override-ini=addopts=", *test.split()]
    command += ["-m", "not slow and not device", "--import-mode=importlib"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, check=False).returncode


def read_mutants(path: Path) -> list[Mutant]:
    """Return the bugs of a file; one that lacks a key, or has another, is a TypeError."""
    return [Mutant(**entry) for entry in parse_yaml(read_text(path, "mutants"), str(path))]


def main() -> int:
    """Plant the bugs, in several copies of the checkout at once, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bugs whose name, file or test this regular expression finds")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    every = read_mutants(CHECKOUT / "tests" / "mutants.yaml")
    chosen = [each for each in every if re.search(given.only, f"{each.name} {each.file} {each.test}")]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.workers) as pool:
        roots: Queue[Path] = Queue()
        for number in range(given.workers):
            roots.put(copy_of_checkout(Path(folder) / str(number)))
        outcomes = dict(zip(chosen, pool.map(partial(_judge, roots=roots), chosen), strict=True))
    num_found = list(outcomes.values()).count(FOUND)
    print(f"{len(chosen)} bugs planted, {num_found} found, {len(chosen) - num_found} not")
    if not given.only and describe_git()["dirty"] is False:
        add_result(CHECKOUT / "docs" / "results" / "proof.json", len(chosen), num_found)
    return int(num_found < len(chosen))


def add_result(path: Path, num_planted: int, num_found: int) -> None:
    """Put the outcome into the results file of `scripts.bench.proof`, which keeps it; its commit stands under `mutants`."""
    results = read_json(path, "results of scripts.bench.proof")
    results["ratios"] |= {"mutants": num_planted, "mutants_killed_share": num_found / num_planted}
    write_json(path, results | {"mutants": {"command": "python -m scripts.bench.mutants", "git": describe_git()}})


def _judge(mutant: Mutant, roots: Queue[Path]) -> str:
    root = roots.get()
    try:
        outcome = mutant.outcome(root)
    finally:
        roots.put(root)
    print(f"{outcome:26} {mutant.name}: {mutant.file}", flush=True)
    return outcome


def copy_of_checkout(folder: Path) -> Path:
    """Copy the files that git tracks, as they are now, and return the folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (CHECKOUT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, folder / name)
    return folder


if __name__ == "__main__":
    sys.exit(main())

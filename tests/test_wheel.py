"""The wheel holds all that its commands need beside the code: templates, suites, recipes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "tests" / "compatibility" / "written_before" / "report.json"
ENTRIES = ["train.heads", "eval.gate", "scripts.push"]
RENDER = """
import sys, eval.report.page as html
from pathlib import Path
from eval.report.schema import load_report
print(html.__file__)
Path("report.html").write_text(html.render_html(load_report(Path(sys.argv[1]))))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A folder with the wheel's contents, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "runs", "build", "tests", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", ignore=left_out)  # setuptools builds where the source lies
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(source)], check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(unpacked, folder, *arguments):
    command, environment = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_runs_as_a_module(unpacked, tmp_path, entry):
    assert "--config FILE" in run(unpacked, tmp_path, "-m", entry, "--help")


def test_the_report_page_is_rendered(unpacked, tmp_path):
    assert run(unpacked, tmp_path, "-c", RENDER, str(REPORT)).startswith(str(unpacked))
    assert "tokens per target step" in (tmp_path / "report.html").read_text()


def test_the_demo_finds_what_came_along_and_writes_to_the_present_folder(unpacked, tmp_path):
    code = (
        "from scripts import demo; "
        "demo.STEPS = {name: [*step, '--print-config'] for name, step in demo.STEPS.items() if name[:4] in ('head', 'data')}; "
        "raise SystemExit(demo.main([]))"
    )
    said = run(unpacked, tmp_path, "-c", code)
    assert "kind: hydra" in said
    assert (tmp_path / "runs" / "demo" / "steps.json").is_file()
    assert not (unpacked / "runs").exists()

"""docs/releasing.md: its workflow is a workflow, and its steps do what the text says when they are run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.runtime.loading import parse_yaml
from eval.report.schema import write_report
from tests.support.reports import changed

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/releasing.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def steps():
    """The steps of the workflow's job, by name."""
    source = re.search(r"<!-- workflow -->\n\n```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[1]
    workflow = parse_yaml(source, "docs/releasing.md")
    (job,) = workflow["jobs"].values()
    return {step.get("name", step.get("uses")): step for step in job["steps"]} | {"env": job["env"]}


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like the repository after set-up, in which a step's script can be run."""
    for name in ("configs", "eval", "heads", "distill"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    interpreter = tmp_path / ".venv/bin/python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    return tmp_path


def run_step(steps, name, folder, **variables):
    environment = {**os.environ, **steps["env"], "BASE": "no-such-branch", **variables}
    command = ["bash", "-eo", "pipefail", "-c", steps[name]["run"]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)


def test_a_draft_is_held_against_the_report_of_the_branch_it_goes_to_not_against_its_own(steps, checkout, report, tiny_run):
    per_prompt = {name: [committed, 2 * rounds] for name, (committed, rounds) in report.acceptance.per_prompt.items()}
    write_report(checkout / "release/served.json", report)
    for command in (["init", "-q"], ["add", "release"], ["commit", "-qm", "Serve a draft"], ["branch", "base"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=checkout, check=True)
    report = changed(report, {"acceptance.per_prompt": per_prompt})
    write_report(checkout / "release/served.json", report)  # as the pull request has it
    write_report(checkout / steps["env"]["REPORT"], report)
    gated = run_step(steps, "Gate", checkout, ARTIFACT=str(tiny_run / "artifact"), BASE="base")
    (compared,) = [line for line in gated.stdout.splitlines() if "times the baseline" in line]
    assert compared.startswith("FAIL"), gated.stdout
    assert "0.5" in compared
    assert (gated.returncode, "FAIL  provenance" in gated.stdout) == (1, True)  # this is not the draft that was measured
    summary = checkout / "summary.md"
    assert run_step(steps, "Summary", checkout, GITHUB_STEP_SUMMARY=str(summary)).returncode == 0
    assert summary.read_text().startswith("## ❌ fail")
